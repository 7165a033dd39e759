"""Gloo processes that train a mixture of experts with given experts, in several layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import gloo
from tests.model import tiny
from tests.model.layout_ranks import Case, examine

SHAPE = tiny.Shape(experts=4, deepstack=(0, 2), dense_layers=(1,))
SPARSE = (0, 2, 3)
TOP_K = 2
CASES: dict[int, dict[str, Case]] = {
    1: {"plain": Case({}), "selective": Case({}, recompute="selective"), "full": Case({}, recompute="full")},
    2: {
        "tp2 sp full": Case({"tensor": 2}, recompute="full"),
        "pp2 selective": Case({"pipeline": 2}, recompute="selective"),
        "pp2 vpp2 full": Case({"pipeline": 2, "virtual": 2}, recompute="full"),
        "cp2": Case({"context": 2}),
        "ep2": Case({"expert": 2}),
        "ep2 tp2 selective": Case({"tensor": 2, "expert": 2}, recompute="selective"),
    },
}


def given_experts() -> dict[str, Tensor]:
    """Random experts of the tokens of each sample, int16 [tokens, MoE layers, top_k]."""
    generator = torch.Generator().manual_seed(11)
    return {
        name: torch.rand(len(sample.tokens), len(SPARSE), SHAPE.experts, generator=generator)
        .argsort(dim=-1)[..., :TOP_K]
        .short()
        for name, sample in tiny.samples().items()
    }


def run(rank: int, ranks: int, folder: str) -> None:
    """Write the results of every case of `ranks` processes to replay-RANKS-CASE.pt, on one rank also own-NAME.pt."""
    platform = gloo.join(rank, ranks, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    for name, case in CASES[ranks].items():
        process_groups.init_process_groups(ParallelSizes(**case.sizes), seed=1)
        found = examine(Path(folder) / "moe", case, platform, tiny.samples(), given_experts())
        everyone: list[Any] = [None] * ranks
        torch.distributed.gather_object(found, everyone if rank == 0 else None)
        if rank == 0:
            torch.save(everyone, f"{folder}/replay-{ranks}-{name}.pt")
        if ranks == 1:
            torch.save(_own(Path(folder) / "moe", case, platform), f"{folder}/own-{name}.pt")
        process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _own(folder: Path, case: Case, platform: Any) -> list[dict[str, Any]]:
    """Results without given experts, with the router's own, and with those of every other token."""
    chosen: list[list[Tensor]] = [[] for _ in SPARSE]  # by layer: top-k indices [tokens, top_k] of each pass

    def probe(chunks: list[Any]) -> None:
        for layer, calls in zip(SPARSE, chosen, strict=True):
            router = chunks[0].decoder.layers[layer].mlp.router

            def keep(_: Any, __: Any, output: tuple[Tensor, Tensor], calls: list[Tensor] = calls) -> None:
                calls.append(output[0].detach().topk(TOP_K, dim=-1).indices.short())

            router.register_forward_hook(keep)

    free = examine(folder, case, platform, tiny.samples(), probe=probe)
    names = list(tiny.samples())
    per_pass = len(chosen[0]) // len(names)  # 2 where the router is recomputed in each backward pass
    own = {name: torch.stack([c[i * per_pass] for c in chosen], dim=1) for i, name in enumerate(names)}
    half = {name: experts.clone() for name, experts in own.items()}
    for experts in half.values():
        experts[::2] = -1
    return [free, *(examine(folder, case, platform, tiny.samples(), each) for each in (own, half))]
