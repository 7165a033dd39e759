"""Optimiser steps of the trainer's packed sequences and of transformers, on the same samples with the same loss.

All variants start from the same folder and use AdamW with the same settings, the mean negative log-likelihood of all
response tokens, and gradients accumulated over the whole minibatch and clipped to norm 1. The samples are those of the
trainer, with encoded images; a step includes decoding them.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.util import torchvision_shim

LEARNING_RATE = 1e-5
LIMIT = timedelta(seconds=120)


@dataclass(frozen=True)
class TrainingBenchConfig:
    """Settings of all variants."""

    model: str  # Hugging Face folder
    dtype: str
    platform: str
    packed_length: int  # tokens of a packed sequence
    padded_batch: int  # samples per padded batch
    attention: str  # transformers' implementation
    threads: int


@dataclass(frozen=True)
class StepMeasurement:
    """One optimiser step."""

    seconds: float
    cpu_seconds: float  # of all threads; not affected by other processes
    loss: float
    tokens: int  # computed by the text model, with padding
    images: int  # encoded by the vision tower


def serve(connection: Connection, parent: int, variant: str, task: TrainingBenchConfig) -> None:
    """Body of a variant's process: take a step for each received batch; after None send the peak memory in bytes."""
    child_process.die_with_parent(parent=parent)
    torch.set_num_threads(task.threads)
    torchvision_shim.install()
    torch.manual_seed(0)
    learner = (VARIANTS | PREFIX_VARIANTS)[variant](task)
    connection.send("ready")
    while (samples := connection.recv()) is not None:
        begun, used = time.perf_counter(), time.process_time()
        loss, tokens, images = learner.step(samples)
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - used
        connection.send(StepMeasurement(seconds, cpu_seconds, loss, tokens, images))
    cuda = torch.cuda.is_available() and task.platform != "cpu"
    kept = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    connection.send(torch.cuda.max_memory_allocated() if cuda else kept)


class PackedLearner:
    """The trainer: packed sequences, Megatron's model and optimiser, one process."""

    def __init__(self, task: TrainingBenchConfig, merge_prefixes: str = "all") -> None:
        from megatron_webrl.model import platform as platforms

        config = Config()
        config.model.path, config.model.dtype, config.model.platform = task.model, task.dtype, task.platform
        config.trainer.tokens_per_microbatch = task.packed_length
        config.trainer.merge_prefixes = merge_prefixes
        config.trainer.optimizer.learning_rate = LEARNING_RATE
        config.trainer.optimizer.schedule, config.trainer.optimizer.warmup_fraction = "constant", 0.0
        platform = platforms.activate(task.platform)
        torch.distributed.init_process_group(
            platform.backend, store=torch.distributed.HashStore(), rank=0, world_size=1, timeout=LIMIT
        )
        # Import Megatron after the platform is active.
        from megatron_webrl.model import process_groups
        from megatron_webrl.model.layout import ParallelSizes
        from megatron_webrl.trainer.main import load_model, make_learner, make_sequence_packer

        process_groups.init_process_groups(ParallelSizes())
        self.learner = make_learner(config, load_model(config, platform))
        self.builder = make_sequence_packer(config, platform)

    def step(self, samples: Sequence[TrainingSample]) -> tuple[float, int, int]:
        """Pack, forward, backward, optimiser step."""
        from megatron_webrl.trainer.loss.objective import negative_log_likelihood

        rows = self.builder.build(samples, "token_mean", 1)
        metrics, _ = self.learner.train_step(rows, None, negative_log_likelihood)
        return metrics["loss"], sum(row.token_count for row in rows), sum(len(row.inputs.grids) for row in rows)


class TransformersLearner:
    """transformers' model and torch's AdamW; batches padded on the left, logits of responses only."""

    def __init__(self, task: TrainingBenchConfig, batch: int, order: str) -> None:
        from transformers import AutoModelForImageTextToText

        cuda = torch.cuda.is_available() and task.platform != "cpu"
        self.device = torch.device("cuda" if cuda else "cpu")
        self.batch, self.order = batch, order
        self.processor = Processor.load(task.model)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            task.model, dtype=getattr(torch, task.dtype), attn_implementation=task.attention, local_files_only=True
        ).to(self.device)
        self.model.train()
        parameters = list(self.model.parameters())
        defaults = Config().trainer.optimizer
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": defaults.weight_decay},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=LEARNING_RATE,
            betas=(0.9, 0.999),
        )

    def step(self, samples: Sequence[TrainingSample]) -> tuple[float, int, int]:
        """Pad, forward, backward, optimiser step."""
        answers = sum(len(sample.response) for sample in samples)
        self.optimizer.zero_grad()
        loss, tokens = 0.0, 0
        batches = self._batches(samples)
        for batch in batches:
            part = self._loss(batch) / answers
            part.backward()
            loss += float(part.detach())
            tokens += len(batch) * max(sample.length for sample in batch)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), Config().trainer.optimizer.clip_norm)
        self.optimizer.step()
        return loss, tokens, sum(len(sample.images) for sample in samples)

    def _batches(self, samples: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
        ordered = list(samples)
        if self.order == "length":
            ordered.sort(key=lambda sample: sample.length)
        else:
            random.Random(0).shuffle(ordered)
        return [ordered[i : i + self.batch] for i in range(0, len(ordered), self.batch)]

    def _loss(self, batch: Sequence[TrainingSample]) -> torch.Tensor:
        """Sum of the negative log-likelihoods of all response tokens."""
        longest, kept = max(s.length for s in batch), max(len(s.response) for s in batch)
        ids = np.full((len(batch), longest), self.processor.eos_token_id, np.int64)
        mask, scored = np.zeros_like(ids), np.zeros((len(batch), kept), bool)
        for row, sample in enumerate(batch):
            ids[row, longest - sample.length :] = np.concatenate([sample.prompt, sample.response])
            mask[row, longest - sample.length :] = 1
            scored[row, kept - len(sample.response) :] = True
        tokens = torch.from_numpy(ids).to(self.device)
        visual = {}
        if any(sample.images for sample in batch):
            pixels, grids = self.processor.pixels([image for sample in batch for image in sample.images])
            places = torch.from_numpy(grids.astype(np.int64)).to(self.device)
            visual = {"pixel_values": pixels.to(self.device, self.model.dtype), "image_grid_thw": places}
        logits = self.model(
            input_ids=tokens,
            attention_mask=torch.from_numpy(mask).to(self.device) if len(batch) > 1 else None,
            mm_token_type_ids=(tokens == self.processor.image_token_id).int(),
            use_cache=False,
            logits_to_keep=kept + 1,
            **visual,
        ).logits[:, :-1]
        chosen = torch.from_numpy(scored).to(self.device)
        return torch.nn.functional.cross_entropy(logits[chosen].float(), tokens[:, -kept:][chosen], reduction="sum")


VARIANTS: dict[str, Any] = {
    "packed sequences, Megatron": PackedLearner,
    "transformers, one by one": lambda task: TransformersLearner(task, 1, "random"),
    "transformers, padded": lambda task: TransformersLearner(task, task.padded_batch, "random"),
    "transformers, padded, sorted by length": lambda task: TransformersLearner(task, task.padded_batch, "length"),
}
PREFIX_VARIANTS: dict[str, Any] = {
    "all common prefixes once": lambda task: PackedLearner(task, "all"),
    "steps of a trajectory merged": lambda task: PackedLearner(task, "trajectory"),
    "nothing merged": lambda task: PackedLearner(task, "none"),
}
"""Choices of trainer.merge_prefixes."""
