"""Megatron's log-probabilities, in the layout asked for; one process a rank, rows made as the trainer makes them.

RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 python -m megatron_webrl.parity.megatron_scores FOLDER
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.parity.samples import ParitySample
from megatron_webrl.parity.scoring_process import (
    ProcessScores,
    ScoringJob,
    Stopwatch,
    peak_bytes,
    process_rank,
    run_scoring_process,
)
from megatron_webrl.system import torchvision_shim


def score(work: ScoringJob, folder: Path) -> ProcessScores:
    """Form the groups, load this rank's part of the model, score one row a sample. Collective over all ranks."""
    clock = Stopwatch()
    torchvision_shim.install()
    platform = platforms.activate(work.platform)
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=process_rank(),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=work.timeout_seconds),
    )
    # Megatron is imported on the platform that is in use.
    from megatron.core import parallel_state

    from megatron_webrl.model import process_groups

    process_groups.init_process_groups(work.sizes, work.seed)
    chunks = _load(work, platform)
    load_seconds = clock.lap()
    logprobs = _score(work, platform, chunks)
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    seconds, peak = clock.lap(), peak_bytes(platform.name == "cuda")
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()
    return ProcessScores(tuple(logprobs) if logprobs and first else None, (), load_seconds, seconds, peak)


def _load(work: ScoringJob, platform: platforms.Platform) -> list[Any]:
    from megatron_webrl.model.load import load_hf
    from megatron_webrl.model.qwen3_vl import model as qwen3_vl

    chunks = qwen3_vl.build_model(work.model, dtype=work.dtype, platform=platform, options=work.compute_options)
    load_hf(chunks, work.model)
    for chunk in chunks:
        chunk.eval()
    return chunks


def _score(work: ScoringJob, platform: platforms.Platform, chunks: list[Any]) -> list[np.ndarray]:
    """Per sample float32 [response], on the last stage; nothing on the others."""
    from megatron.core import parallel_state

    from megatron_webrl.model import schedule
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    parts = _rows(work, platform)
    rows = [batch for part in parts for batch in part]

    def scored(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        group, vocabulary = parallel_state.get_tensor_model_parallel_group(), chunks[-1].unpadded_vocab_size
        values, _ = vocab_parallel_logprobs(logits, rows[index].targets, 1.0, vocabulary, group)
        return values.sum(), {"logprobs": values}

    with torch.no_grad():
        results = schedule.forward_backward(chunks, [batch.row for batch in rows], scored, forward_only=True)
    values = [result["logprobs"].float().cpu().numpy() for result in results]
    starts = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    return [values[start] for start in starts] if values else []


def _rows(work: ScoringJob, platform: platforms.Platform) -> list[list[Any]]:
    """The micro-batches of each sample by itself; its first is the sample.

    A virtual pipeline takes rows in multiples of its stages only: the builder fills up with the same sample.
    """
    from megatron_webrl.trainer.factory import make_sequence_packer

    config, sizes = Config(), work.sizes
    config.model.path, config.model.dtype = str(work.model), work.dtype
    config.trainer.tensor_parallel, config.trainer.pipeline_parallel = sizes.tensor, sizes.pipeline
    config.trainer.virtual_pipeline, config.trainer.expert_parallel = sizes.virtual, sizes.expert
    config.trainer.tokens_per_microbatch = max(sample.length for sample in work.samples)
    builder = make_sequence_packer(config, platform)
    return [builder.build([_trained(sample)], "token_mean", 1) for sample in work.samples]


def _trained(sample: ParitySample) -> Any:
    from megatron_webrl.trainer.data.batching import TrainingSample as Trained

    return Trained(
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
