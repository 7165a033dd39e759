"""Tokens, operations and MFU of an update."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.prefix_merging import merge_prefixes, unique_images, unmerged_sequence
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker
from megatron_webrl.trainer.telemetry import known_peak_tflops, performance_metrics
from tests.trainer.growing_prompts import episode


def test_the_figures_are_by_rank_and_mfu_is_a_share_of_the_peak() -> None:
    # 4 ranks, 2 s: 8 rank-seconds of 989 TFLOP/s hold 7.912e15 operations.
    found = performance_metrics(8000.0, 3.956e15, 2.0, 4, 989.0)
    assert found["performance/tokens_per_second_per_gpu"] == 1000.0
    assert found["performance/tflops_per_gpu"] == pytest.approx(494.5)
    assert found["performance/mfu"] == pytest.approx(0.5)


def test_there_is_no_mfu_without_a_peak() -> None:
    assert known_peak_tflops(torch.device("cpu"), "bfloat16") is None
    assert known_peak_tflops(torch.device("cuda"), "float32") is None
    assert sorted(performance_metrics(1.0, 1.0, 1.0, 1, None)) == [
        "performance/tflops_per_gpu", "performance/tokens_per_second_per_gpu",
    ]  # fmt: skip


def test_micro_batches_count_what_they_compute_once(tiny_model: Path) -> None:
    processor, cost = Processor.load(tiny_model), FlopsEstimator.from_hf_config(load_hf_config(tiny_model))
    samples = episode(processor, 0, (6, 2, 9))

    def build(merge: str, rank: int = 0, replicas: int = 1, context_rank: int = 0, ranks: int = 1) -> list[Microbatch]:
        packer = SequencePacker(
            processor, 2000, torch.device("cpu"), rank, replicas, cost, merge_prefixes=merge,
            context_parallel_rank=context_rank, context_parallel_size=ranks,
        )  # fmt: skip
        return packer.build(samples, "token_mean", 1)

    [merged], [apart] = build("all"), build("none")
    sequences = [unmerged_sequence(sample) for sample in samples]
    assert merged.operations == pytest.approx(
        cost.packed_flops(*merge_prefixes(samples, processor.placeholder_token_ids))
    )
    assert apart.operations == pytest.approx(cost.packed_flops(*sequences))
    images = sum(cost.image_flops(grid) for _, grid in unique_images(sequences))
    assert images < merged.operations < apart.operations
    # Of a micro-batch that several ranks share one counts it, and a padding one counts nothing.
    [second] = build("all", context_rank=1, ranks=2)
    assert second.operations == second.token_count == 0
    padding = [batch for rank in range(4) for batch in build("all", rank, 4) if batch.token_count == 0]
    assert padding
    assert not any(batch.operations for batch in padding)
