"""Tokens, operations and MFU of an update, and its profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.track.timeline import PROFILES, Timeline
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.prefix_merging import merge_prefixes, unique_images, unmerged_sequence
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker
from megatron_webrl.trainer.telemetry import known_peak_tflops, performance_metrics, profiled
from tests.trainer.growing_prompts import episode


def test_the_figures_are_by_rank_and_mfu_is_a_share_of_the_peak_if_it_is_known() -> None:
    # 4 ranks, 2 s: 8 rank-seconds of 989 TFLOP/s hold 7.912e15 operations.
    figures = performance_metrics(8000.0, 3.956e15, 2.0, 4, 989.0)
    assert {name.removeprefix("performance/"): value for name, value in figures.items()} == pytest.approx(
        {"tokens_per_second_per_gpu": 1000.0, "tflops_per_gpu": 494.5, "mfu": 0.5}
    )
    assert figures.keys() - performance_metrics(1.0, 1.0, 1.0, 1, None).keys() == {"performance/mfu"}
    assert known_peak_tflops(torch.device("cpu"), "bfloat16") is None
    assert known_peak_tflops(torch.device("cuda"), "float32") is None


def test_micro_batches_count_what_they_compute_once(tiny_model: Path) -> None:
    processor, cost = Processor.load(tiny_model), FlopsEstimator.from_hf_config(load_hf_config(tiny_model))
    samples = episode(processor, 0, (6, 2, 9))

    def build(merge: str) -> list[Microbatch]:
        packer = SequencePacker(processor, 2000, torch.device("cpu"), 0, 1, cost, merge_prefixes=merge)
        return packer.build(samples, "token_mean", 1)

    [merged], [apart] = build("all"), build("none")
    sequences = [unmerged_sequence(sample) for sample in samples]
    assert merged.operations == pytest.approx(
        cost.packed_flops(*merge_prefixes(samples, processor.placeholder_token_ids))
    )
    assert apart.operations == pytest.approx(cost.packed_flops(*sequences))
    images = sum(cost.image_flops(grid) for _, grid in unique_images(sequences))
    assert images < merged.operations < apart.operations


def test_only_chosen_updates_of_the_first_rank_are_profiled(tmp_path: Path) -> None:
    config, timeline = Config(), Timeline(recording=True)
    config.run.directory, config.run.name = str(tmp_path), "profiled"
    config.trainer.profile_updates = [3]
    config.run_folder.mkdir()
    weights = torch.ones(8, 8, requires_grad=True)
    for rank, version in ((0, 2), (1, 3), (0, 3)):
        with profiled(config, rank, version, timeline):
            (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
    assert [span[0] for span in timeline.take()] == ["profile", "write profile"]
    (file,) = (config.run_folder / PROFILES).iterdir()
    assert file.name == "update-000003.trainer-0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == 3  # one forward, two backward
