"""Gloo processes of the layout tests: every layout of the models on the same samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.model import tiny
from tests.model.qwen3_5 import small
from tests.trainer.ranks import process_groups

MODELS = {
    # More DeepStack layers than the first of four stages has.
    "dense": tiny.Shape(deepstack=(0, 1, 2)),
    "tied": tiny.Shape(tie=True, layers=5, key_value_heads=4),
    "sparse": tiny.Shape(experts=4, deepstack=(0, 2), dense_layers=(1,)),
    "sparse tied": tiny.Shape(tie=True, experts=4, key_value_heads=4),
    "hybrid": small.MODELS["dense"],
    "hybrid tied": small.MODELS["dense-tied"],
    "hybrid sparse": small.MODELS["sparse"],
}


@dataclass(frozen=True)
class Case:
    """A layout with compute options, and models for which it is valid."""

    sizes: dict[str, int]
    models: tuple[str, ...] = ()
    sequence_parallel: bool = True
    recompute: str = "none"
    experts: str = "auto"


GROUPS: dict[str, tuple[int, list[Case]]] = {
    "one-rank": (1, [Case({}, ("sparse", "hybrid tied"), recompute="full"), Case({}, ("hybrid sparse",))]),
    "tensor": (
        2,
        [Case({"tensor": 2}, ("dense",), sequence_parallel=False), Case({"tensor": 2}, ("tied", "hybrid sparse"))],
    ),
    "pipeline": (
        2,
        [
            Case({"pipeline": 2}, ("hybrid tied",)),
            Case({"pipeline": 2, "virtual": 2}, ("dense",), recompute="selective"),
        ],
    ),
    "context-data": (2, [Case({"context": 2}, ("sparse",), experts="sequential"), Case({}, ("tied",))]),
    "experts": (
        2,
        [
            Case({"expert": 2}, ("hybrid sparse",)),
            Case({"tensor": 2, "expert_tensor": 2}, ("sparse tied",), recompute="selective"),
        ],
    ),
    "all-dense": (4, [Case({"tensor": 2, "pipeline": 2, "virtual": 2}, ("tied",), recompute="full")]),
    "all-sparse": (4, [Case({"tensor": 2, "pipeline": 2, "expert": 2}, ("sparse",))]),
    "more-two-ranks": (
        2,
        [
            Case({"tensor": 2}, ("dense", "sparse"), recompute="full"),
            Case({"pipeline": 2, "virtual": 2}, ("sparse",)),
            Case({"tensor": 2}, ("hybrid tied",), sequence_parallel=False),
            Case({}, ("hybrid",)),
            Case({"tensor": 2, "expert": 2}, ("sparse", "hybrid sparse")),
        ],
    ),
    "more-four-ranks": (
        4,
        [
            Case({"pipeline": 4}, ("dense", "hybrid")),
            Case({"tensor": 2, "pipeline": 2}, ("dense", "hybrid tied"), sequence_parallel=False),
            Case({"context": 2, "tensor": 2}, ("tied", "sparse tied")),
            Case({"context": 2, "pipeline": 2}, ("dense",), recompute="full"),
            Case({"context": 2, "expert": 2}, ("sparse",)),
            Case({"tensor": 2, "expert": 2, "expert_tensor": 2}, ("sparse",)),
        ],
    ),
}
"""Processes and cases; "all" are layouts of all kinds together."""


def samples(model: str) -> dict[str, tiny.Sample]:
    return small.samples() if MODELS[model].is_linear else tiny.samples()


def run(platform: Any, _: Path, folder: Path, group: str) -> dict[tuple[int, str], dict[str, Any]]:
    from megatron_webrl.model.layout import ParallelSizes

    found = {}
    for number, case in enumerate(GROUPS[group][1]):
        with process_groups(ParallelSizes(**case.sizes)):
            for model in case.models:
                found[number, model] = examine(folder / model, case, platform, samples(model))
    return found


def examine(
    folder: Path, case: Case, platform: Any, parts: dict[str, tiny.Sample], experts: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """Logits of this replica's samples, and on the first rank the gradients of all.

    `experts`: of each sample's tokens, see PackedInput.
    """
    from megatron.core import parallel_state

    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from tests.model.hf_export import hf_tensors

    options: dict[str, Any] = {name: getattr(case, name) for name in ("sequence_parallel", "recompute", "experts")}
    chunks = build_model(folder, dtype="float32", platform=platform, options=ComputeOptions(**options))
    load_hf(chunks, folder)
    wrapped = wrap(chunks)
    replica, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
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
