"""Micro-batches of the tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker

Build = Callable[..., list[Microbatch]]


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


@pytest.fixture(scope="module")
def build(processor: Processor, tiny_model: Path) -> Build:
    cost = FlopsEstimator.from_hf_config(load_hf_config(tiny_model))

    def built(samples: list[TrainingSample], normalizer: str = "per_trajectory", **options: Any) -> list[Microbatch]:
        settings = {"max_tokens": 400, "data_parallel_rank": 0, "data_parallel_size": 1} | options
        packer = SequencePacker(processor, device=torch.device("cpu"), flops_estimator=cost, **settings)
        return packer.build(samples, normalizer, 10)

    return built
