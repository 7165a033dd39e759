"""Warm start: imitate scripted episodes before RL, so that some of the first groups succeed."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.trainer import WARM_START_TIMEOUT_SECONDS
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.loss.objective import negative_log_likelihood
from megatron_webrl.trainer.optimizer import make_optimizer
from megatron_webrl.types import Group, Trajectory

log = logging.getLogger(__name__)


def warm_start(chunks: list[Any], packer: SequencePacker, config: Config, control: ControlClient) -> None:
    """Train the model's chunks on demonstrations from a file or from the first worker.

    Collective. Every rank reads the same file. Raises JobFailed if it comes too late or has another tokenizer.
    """
    packer = replace(packer, image_cache=None)  # the samples have their images
    settings, dtype = config.trainer.warm_start, next(chunks[0].parameters()).dtype
    demonstrations = _wait_for_demonstrations(config, control)
    _check_tokenizer(demonstrations[0], packer.processor, config.demonstrations_path)
    groups = [Group(t.ticket, (t,)) for t in demonstrations]
    samples = batching.make_samples(groups, batching.demonstration_advantages)
    warm_start_config = replace(config.trainer.optimizer, learning_rate=settings.learning_rate, warmup_fraction=0.05)
    steps = settings.epochs * -(-len(samples) // settings.samples_per_update)
    optimizer = make_optimizer(chunks, warm_start_config, steps, dtype)
    vocab_size = chunks[0].module.unpadded_vocab_size
    learner = Learner(chunks, vocab_size, optimizer, report_progress=control.report_progress)
    started, step = time.monotonic(), 0
    for microbatches in _prefetch_one(_minibatches(packer, samples, config)):
        metrics, _ = learner.train_step(microbatches, None, negative_log_likelihood)
        step += 1
        control.report_status(f"warm start, step {step} of {steps}, loss {metrics['loss']:.3f}")
        control.check_job()
    seconds, waited = time.monotonic() - started, packer.wait_timer.pop_seconds()
    log.info(
        "warm start: %d steps on %d samples in %.1f s (%.1f s of them waiting for images), loss %.4f",
        step, len(samples), seconds, waited, metrics["loss"],
    )  # fmt: skip
    control.put_json("demonstrations/trained", True)


def _wait_for_demonstrations(config: Config, control: ControlClient) -> list[Trajectory]:
    count, path = config.trainer.warm_start.demonstrations, config.demonstrations_path
    control.report_status("waiting for demonstrations")
    control.wait_for_key(
        "demonstrations/ready", WARM_START_TIMEOUT_SECONDS, "demonstrations from rollout-0", ("rollout-0",)
    )
    got = [decode_trajectory(record, copy=True) for record in islice(read_record_file(path), count)]
    if len(got) < count:
        raise JobFailed(f"{path} holds {len(got)} demonstrations, fewer than trainer.warm_start.demonstrations={count}")
    return got


def _minibatches(
    packer: SequencePacker, samples: Sequence[TrainingSample], config: Config
) -> Iterator[list[Microbatch]]:
    """Micro-batches of each optimiser step: all samples once per epoch, in a new random order."""
    settings = config.trainer.warm_start
    for epoch in range(settings.epochs):
        order = random.Random(config.run.seed + epoch).sample(range(len(samples)), len(samples))
        for first in range(0, len(order), settings.samples_per_update):
            minibatch = [samples[i] for i in order[first : first + settings.samples_per_update]]
            yield packer.build(minibatch, "token_mean", 1)


def _prefetch_one(minibatches: Iterator[list[Microbatch]]) -> Iterator[list[Microbatch]]:
    """The same items, each requested one step early: its images are processed during the step before it."""
    upcoming = next(minibatches, None)
    while upcoming is not None:
        current, upcoming = upcoming, next(minibatches, None)
        yield current


def _check_tokenizer(demonstration: Trajectory, processor: Processor, path: Path) -> None:
    """Raises JobFailed unless the responses' tokens survive decoding and encoding with the model's tokenizer."""
    for step in demonstration.steps:
        encoded = processor.encode_response(processor.decode(step.response_token_ids[:-1]))
        if encoded.tolist() != step.response_token_ids.tolist():
            raise JobFailed(f"{path} was made with another tokenizer than that of model.path; make the file again")
