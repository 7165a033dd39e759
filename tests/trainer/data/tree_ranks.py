"""Rank bodies of the tests of the prefix tree: the same group in several layouts, with and without common prefixes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from tests import gloo
from tests.model.layout_ranks import wrap
from tests.trainer.data.packing_ranks import group_samples

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2, sequence parallel": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2, "recompute": "full"},
    "dp2": {"data_parallel": 2, "recompute": "selective"},
}
MERGED = ("none", "all")


def run(rank: int, folder: str, model: str) -> None:
    """Write computed tokens, log-probabilities and gradients to found.pt: layout -> merged -> ranks."""
    platform = gloo.join(rank, 2, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.trainer.parallel import all_gather_object, parallel_sizes

    found: dict[str, dict[str, list[Any]]] = {}
    for name, layout in LAYOUTS.items():
        config = Config()
        config.model.path, config.trainer.tokens_per_microbatch = model, 200
        for key, value in layout.items():
            setattr(config.trainer, key, value)
        process_groups.init_process_groups(parallel_sizes(config), seed=1)
        found[name] = {merged: all_gather_object(_pass(config, merged, platform)) for merged in MERGED}
        process_groups.destroy_process_groups()
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def _pass(config: Config, merged: str, platform: Any) -> dict[str, Any]:
    """Scores and gradients of one rank."""
    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs
    from megatron_webrl.trainer.main import compute_options, make_sequence_packer

    path, trainer = config.model.path, config.trainer
    chunks = build_model(path, dtype="float32", platform=platform, options=compute_options(config, platform))
    load_hf(chunks, path)
    trainer.merge_prefixes = merged
    packer = replace(make_sequence_packer(config, platform), min_shared_tokens=2)
    batches = packer.build(group_samples(packer.processor), "token_mean", 1)
    scores: dict[float, float] = {}  # a token is named by its behaviour log-probability

    def loss_of(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        batch, vocabulary = batches[index], chunks[-1].unpadded_vocab_size
        logprobs, _ = vocab_parallel_logprobs(logits, batch.targets, 1.0, vocabulary, chunks[-1].pg_collection.tp)
        scores.update(zip(batch.behaviour_logprobs.tolist(), logprobs.tolist(), strict=True))
        loss = (batch.weight * batch.advantage * logprobs).sum()
        return loss * len(batches) * trainer.data_parallel, {}  # Megatron averages over micro-batches and replicas

    schedule.forward_backward(wrap(chunks), [batch.inputs for batch in batches], loss_of, forward_only=False)
    return {
        "tokens": sum(batch.token_count for batch in batches),
        "scores": scores,
        "gradients": {n: p.main_grad.clone() for chunk in chunks for n, p in chunk.named_parameters()},
    }
