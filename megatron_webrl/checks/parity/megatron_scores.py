"""Log-probabilities of Megatron: one process per rank, micro-batches made by the trainer's sequence packer."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.checks.parity.samples import ParitySample
from megatron_webrl.checks.parity.scoring_process import (
    ProcessScores,
    ScoringJob,
    Stopwatch,
    peak_bytes,
    process_rank,
    run_scoring_process,
)
from megatron_webrl.config.schema import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.util import torchvision_shim


def score(job: ScoringJob, folder: Path) -> ProcessScores:
    """Form process groups, load this rank's part of the model, score one sample per micro-batch. Collective."""
    stopwatch = Stopwatch()
    torchvision_shim.install()
    platform = platforms.activate(job.platform)
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=process_rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=job.timeout_seconds),
    )
    # Megatron must be imported after the platform is active.
    from megatron.core import parallel_state

    from megatron_webrl.model import process_groups

    process_groups.init_process_groups(job.sizes, job.seed)
    chunks = _load(job, platform)
    stopwatch.lap()
    logprobs = _score(job, platform, chunks)
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    seconds, peak = stopwatch.lap(), peak_bytes(platform.name == "cuda")
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()
    return ProcessScores(tuple(logprobs) if logprobs and first else None, (), seconds, peak)


def _load(job: ScoringJob, platform: platforms.Platform) -> list[Any]:
    from megatron_webrl.model.build import build_model
    from megatron_webrl.model.load import load_hf

    chunks = build_model(job.model, dtype=job.dtype, platform=platform, options=job.compute_options)
    load_hf(chunks, job.model)
    for chunk in chunks:
        chunk.eval()
    return chunks


def _score(job: ScoringJob, platform: platforms.Platform, chunks: list[Any]) -> list[np.ndarray]:
    """Per sample float32 [response] on the last stage; an empty list on other stages."""
    from megatron.core import parallel_state

    from megatron_webrl.model import schedule
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    by_sample = _microbatches(job, platform)
    microbatches = [each for part in by_sample for each in part]

    def scored(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        group, vocabulary = parallel_state.get_tensor_model_parallel_group(), chunks[-1].unpadded_vocab_size
        values, _ = vocab_parallel_logprobs(logits, microbatches[index].targets, 1.0, vocabulary, group)
        return values.sum(), {"logprobs": values}

    with torch.no_grad():
        results = schedule.forward_backward(chunks, [each.inputs for each in microbatches], scored, forward_only=True)
    values = [result["logprobs"].float().cpu().numpy() for result in results]
    starts = np.cumsum([0, *(len(part) for part in by_sample)])[:-1]
    return [values[start] for start in starts] if values else []


def _microbatches(job: ScoringJob, platform: platforms.Platform) -> list[list[Any]]:
    """The micro-batches of each sample, itself first: a virtual pipeline needs more, which the packer pads with it."""
    from megatron_webrl.trainer.factory import make_sequence_packer

    config, sizes = Config(), job.sizes
    config.model.path, config.model.dtype = str(job.model), job.dtype
    config.trainer.tensor_parallel, config.trainer.pipeline_parallel = sizes.tensor, sizes.pipeline
    config.trainer.virtual_pipeline, config.trainer.expert_parallel = sizes.virtual, sizes.expert
    config.trainer.tokens_per_microbatch = max(sample.length for sample in job.samples)
    packer = make_sequence_packer(config, platform)
    return [packer.build([_training_sample(sample)], "token_mean", 1) for sample in job.samples]


def _training_sample(sample: ParitySample) -> Any:
    from megatron_webrl.trainer.data.batching import TrainingSample

    return TrainingSample(
        prompt=sample.prompt_token_ids,
        response=sample.response_token_ids,
        behaviour_logprobs=np.zeros(len(sample.response_token_ids), np.float32),
        versions=np.zeros(len(sample.response_token_ids), np.int32),
        images=sample.images,
        grids=sample.image_grids,
        temperature=1.0,
        advantage=1.0,
        trajectory_steps=1,
        trajectory_id=(0, 0),
    )


if __name__ == "__main__":
    run_scoring_process(score)
