"""Gloo processes of the layout tests: every layout of the model on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import gloo
from tests.model import tiny

Probe = Callable[[list[Any]], None]
MODELS = {
    # More DeepStack layers than the first of four stages has.
    "dense": tiny.Shape(deepstack=(0, 1, 2)),
    "dense-tied": tiny.Shape(tie=True, layers=5, key_value_heads=4),
    "sparse": tiny.Shape(experts=4, deepstack=(0, 2), dense_layers=(1,)),
    "sparse-tied": tiny.Shape(tie=True, experts=4, key_value_heads=4),
}


@dataclass(frozen=True)
class Case:
    """A layout with compute options."""

    sizes: dict[str, int]
    sequence_parallel: bool = True
    recompute: str = "none"

    def fits(self, key_value_heads: int, experts: int) -> bool:
        """Whether the layout is valid for a model: experts need sequence parallelism with tensor parallelism."""
        tensor, split = self.sizes.get("tensor", 1), self.sizes.get("expert", 1) * self.sizes.get("expert_tensor", 1)
        if key_value_heads % (tensor * self.sizes.get("context", 1)):
            return False
        return self.sequence_parallel or tensor == 1 if experts else split == 1


CASES: dict[int, dict[str, Case]] = {
    1: {"tp1": Case({}), "tp1 selective": Case({}, recompute="selective"), "tp1 full": Case({}, recompute="full")},
    2: {
        "tp2": Case({"tensor": 2}, sequence_parallel=False),
        "tp2 sp": Case({"tensor": 2}),
        "tp2 sp full": Case({"tensor": 2}, recompute="full"),
        "pp2": Case({"pipeline": 2}),
        "pp2 vpp2": Case({"pipeline": 2, "virtual": 2}),
        "cp2": Case({"context": 2}),
        "dp2": Case({}),
        "ep2": Case({"expert": 2}),
        "ep2 tp2": Case({"tensor": 2, "expert": 2}),
        "tp2 etp2 selective": Case({"tensor": 2, "expert_tensor": 2}, recompute="selective"),
    },
    4: {
        "pp4": Case({"pipeline": 4}),
        "tp2 pp2": Case({"tensor": 2, "pipeline": 2}, sequence_parallel=False),
        "tp2 sp pp2": Case({"tensor": 2, "pipeline": 2}),
        "tp2 sp pp2 vpp2 full": Case({"tensor": 2, "pipeline": 2, "virtual": 2}, recompute="full"),
        "tp2 dp2": Case({"tensor": 2}),
        "cp2 tp2": Case({"context": 2, "tensor": 2}),
        "cp2 pp2": Case({"context": 2, "pipeline": 2}, recompute="full"),
        "cp2 ep2": Case({"context": 2, "expert": 2}),
        "ep2 pp2": Case({"pipeline": 2, "expert": 2}),
        "ep2 etp2 tp2": Case({"tensor": 2, "expert": 2, "expert_tensor": 2}),
        "ep2 tp2 pp2": Case({"tensor": 2, "pipeline": 2, "expert": 2}),
    },
}


def models(ranks: int, case: Case) -> list[str]:
    """Models of a case: on four ranks one dense and one sparse model at most."""
    fitting = [name for name, shape in MODELS.items() if case.fits(shape.key_value_heads, shape.experts)]
    if ranks < 4:
        return fitting
    kinds = {bool(MODELS[name].experts): name for name in reversed(fitting)}
    return [name for name in fitting if name in kinds.values()]


def pairs() -> list[tuple[int, str, str]]:
    """Ranks, case and model of all comparisons."""
    return [
        (ranks, case, model)
        for ranks, cases in CASES.items()
        for case, what in cases.items()
        for model in models(ranks, what)
    ]


def run(rank: int, ranks: int, folder: str) -> None:
    """Write the results of every case of `ranks` processes to found-RANKS-CASE-MODEL.pt."""
    run_cases(rank, ranks, folder, CASES[ranks], lambda case: models(ranks, case), tiny.samples())


def run_cases(
    rank: int,
    ranks: int,
    folder: str,
    cases: Mapping[str, Case],
    models_of: Callable[[Case], list[str]],
    parts: dict[str, tiny.Sample],
    examine_more: Callable[[str, Path, Any], dict[str, Any]] = lambda *_: {},
) -> None:
    """Write the results of `examine` on all ranks, and of `examine_more`, to found-RANKS-CASE-MODEL.pt.

    `examine_more`: from the name of the case, the folder of the model and the platform.
    """
    platform = gloo.join(rank, ranks, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    for name, case in cases.items():
        process_groups.init_process_groups(ParallelSizes(**case.sizes), seed=1)
        for model in models_of(case):
            path = Path(folder) / model
            found = examine(path, case, platform, parts) | examine_more(name, path, platform)
            everyone: list[Any] = [None] * ranks
            torch.distributed.gather_object(found, everyone if rank == 0 else None)
            if rank == 0:
                torch.save(everyone, f"{folder}/found-{ranks}-{name}-{model}.pt")
        process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def examine(
    folder: Path,
    case: Case,
    platform: Any,
    parts: dict[str, tiny.Sample],
    experts: Mapping[str, Tensor] | None = None,
    probe: Probe = lambda _: None,
) -> dict[str, Any]:
    """Logits of this replica's samples, and on the first rank the gradients of all.

    `experts`: of each sample's tokens, see PackedInput. `probe` gets the model chunks before the pass.
    """
    from megatron.core import parallel_state

    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from tests.model.hf_export import hf_tensors

    settings = ComputeOptions(sequence_parallel=case.sequence_parallel, recompute=case.recompute)  # type: ignore[arg-type]
    chunks = build_model(folder, dtype="float32", platform=platform, options=settings)
    load_hf(chunks, folder)
    wrapped = wrap(chunks)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    probe(chunks)
    names, rows, weights = _rows(parts, replica, replicas, case.sizes.get("pipeline", 1))
    groups = chunks[0].pg_collection
    masks = [_scored_here(row, groups, case) for row, _ in rows]
    group = groups.tp
    found: dict[str, Any] = {}

    def loss_of(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        from megatron_webrl.model.logprobs import vocab_parallel_logprobs

        _, targets = rows[index]
        mask = masks[index]
        logprobs, entropy = vocab_parallel_logprobs(logits, targets[mask], tiny.TEMPERATURE, tiny.VOCABULARY, group)
        shards = [torch.empty_like(logits) for _ in range(group.size())]
        torch.distributed.all_gather(shards, logits.detach().contiguous(), group=group)
        whole = torch.cat(shards, dim=1)[:, : tiny.VOCABULARY]
        # Megatron averages over rows and replicas.
        loss = (logprobs * weights[index][mask]).sum() * len(rows) * replicas
        return loss, {"logits": whole, "logprobs": logprobs.detach(), "entropy": entropy, "mask": mask}

    mine = [
        replace(
            row,
            scored_positions=row.scored_positions[mask],
            experts=None if experts is None else experts[name or "text"],
        )
        for name, (row, _), mask in zip(names, rows, masks, strict=True)
    ]
    results = schedule.forward_backward(wrapped, mine, loss_of, forward_only=False)
    found["rows"] = {name: result for name, result in zip(names, results, strict=False) if name}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    found["gradients"] = {name: tensor.clone() for name, tensor in hf_tensors(chunks)}
    return found


def _scored_here(row: Any, groups: Any, case: Case) -> Tensor:
    """bool [R]: scored positions of this context-parallel rank."""
    from megatron_webrl.model.vision_language.packed_input import token_range

    multiple = groups.tp.size() if case.sequence_parallel else 1
    share = token_range(row.tokens.numel(), groups.cp.rank(), groups.cp.size(), multiple)
    return (row.scored_positions >= share.start) & (row.scored_positions < share.stop)


def wrap(chunks: list[Any]) -> list[Any]:
    """Wrap in DistributedDataParallel with complete gradients on every rank."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_webrl.model import gradients

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = []
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = gradients.finalize_gradients
        wrapped.append(DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk))
        wrapped[-1].zero_grad_buffer()
        wrapped[-1].train()
    return wrapped


def _rows(
    parts: dict[str, tiny.Sample], replica: int, replicas: int, multiple: int
) -> tuple[list[str | None], list[tuple[Any, Tensor]], list[Tensor]]:
    """One row a sample, shared out over the replicas, and rows without weight so that all have equally many."""
    counts = [len(sample.tokens) - sample.prompt for sample in parts.values()]
    weights = dict(zip(parts, tiny.token_weights(sum(counts)).split(counts), strict=True))
    mine: list[str | None] = [name for i, name in enumerate(parts) if i % replicas == replica]
    most = -(-len(parts) // replicas)
    mine += [None] * (-(-most // multiple) * multiple - len(mine))
    rows = [tiny.pack([parts[name or "text"]]) for name in mine]
    return mine, rows, [weights[name] if name else torch.zeros(counts[0]) for name in mine]
