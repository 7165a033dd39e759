"""Given experts replace the router's choice, and its weights and gradients remain those of the given experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED, pad_to_multiple
from tests import gloo
from tests.model import tiny
from tests.model.layout_ranks import MODELS, Case, examine
from tests.model.test_layouts import check

SHAPE = MODELS["sparse"]
SPARSE = (0, 2, 3)
TOP_K = 2
CASES: dict[int, list[Case]] = {
    1: [Case({}), Case({}, recompute="full")],
    2: [
        Case({"pipeline": 2, "virtual": 2}, recompute="full"),
        Case({"context": 2}),
        Case({"tensor": 2, "expert": 2}, recompute="selective"),
    ],
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
    """Write the results of every case of `ranks` processes to replay-RANKS.pt, on one rank also own.pt."""
    platform = gloo.join(rank, ranks, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    found, own = [], []
    for case in CASES[ranks]:
        process_groups.init_process_groups(ParallelSizes(**case.sizes), seed=1)
        everyone: list[Any] = [None] * ranks
        mine = examine(Path(folder) / "moe", case, platform, tiny.samples(), given_experts())
        torch.distributed.gather_object(mine, everyone if rank == 0 else None)
        found.append(everyone)
        if ranks == 1:
            own.append(_own(Path(folder) / "moe", case, platform))
        process_groups.destroy_process_groups()
    if rank == 0:
        torch.save(found, f"{folder}/replay-{ranks}.pt")
        torch.save(own, f"{folder}/own-{ranks}.pt")
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


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Folder of the model; logits by sample and gradients of transformers whose tokens go to the given experts."""
    folder = tmp_path_factory.mktemp("replay")
    model = tiny.write_model(folder / "moe", SHAPE, 3)
    parts, experts, logits = tiny.samples(), given_experts(), {}
    weights = tiny.token_weights(sum(len(s.tokens) - s.prompt for s in parts.values()))
    first = 0
    for name, sample in parts.items():
        with _forced(model, experts[name]):
            logits[name] = tiny.reference_logits(model, sample)
        scaled = (logits[name] / tiny.TEMPERATURE).log_softmax(dim=-1)
        logprobs = scaled.gather(1, sample.tokens[sample.prompt :, None]).squeeze(1)
        (logprobs * weights[first : first + len(logprobs)]).sum().backward()
        first += len(logprobs)
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    return folder, {name: each.detach() for name, each in logits.items()}, gradients


@contextmanager
def _forced(model: Any, experts: Tensor) -> Iterator[None]:
    """Let transformers' routers return the given experts with their renormalised probabilities."""
    gates = [model.model.language_model.layers[layer].mlp.gate for layer in SPARSE]
    hooks = []
    for gate, chosen in zip(gates, experts.long().unbind(1), strict=True):

        def force(_: Any, __: Any, output: Any, chosen: Tensor = chosen) -> tuple[Tensor, ...]:
            logits = output[0]
            weights = logits.softmax(dim=-1).gather(1, chosen)
            return logits, weights / weights.sum(dim=-1, keepdim=True), chosen

        hooks.append(gate.register_forward_hook(force))
    yield
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="module")
def alone(reference: tuple[Path, Any, Any]) -> Path:
    """Folder of the results of one rank."""
    gloo.spawn(run, 1, str(reference[0]), ranks=1)
    return reference[0]


def test_given_experts_compute_what_transformers_computes_with_them(
    alone: Path, reference: tuple[Path, dict[str, Tensor], dict[str, Tensor]]
) -> None:
    for everyone in torch.load(alone / "replay-1.pt"):
        check("sparse", everyone, *reference[1:])


def test_layouts_that_shard_tokens_experts_and_layers_share_out_given_experts(
    reference: tuple[Path, dict[str, Tensor], dict[str, Tensor]],
) -> None:
    gloo.spawn(run, 2, str(reference[0]))
    for everyone in torch.load(reference[0] / "replay-2.pt"):
        check("sparse", everyone, *reference[1:])


def test_the_routers_own_experts_change_no_bit(alone: Path) -> None:
    """Neither those of all tokens, nor of every other one; and the given random ones do change the logits."""
    for [replayed], (free, *others) in zip(
        torch.load(alone / "replay-1.pt"), torch.load(alone / "own-1.pt"), strict=True
    ):
        for found in others:
            for name, row in free["rows"].items():
                assert torch.equal(found["rows"][name]["logits"], row["logits"])
            for key, gradient in free["gradients"].items():
                assert torch.equal(found["gradients"][key], gradient), key
        assert (replayed["rows"]["text"]["logits"] - free["rows"]["text"]["logits"]).abs().max() > 0.1


def test_padding_has_no_experts() -> None:
    sample = tiny.samples()["text"]
    packed = replace(tiny.pack([sample])[0], experts=given_experts()["text"])
    padded = pad_to_multiple(packed, 8).experts
    assert padded is not None
    assert packed.experts is not None
    assert padded.shape == (32, 3, 2)
    assert torch.equal(padded[:26], packed.experts)
    assert (padded[26:] == NOT_RECORDED).all()
