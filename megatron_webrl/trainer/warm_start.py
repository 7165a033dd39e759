"""Warm start: imitate scripted episodes before RL, so that some of the first groups succeed."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient, JobFailed
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory
from megatron_webrl.ring.record_file import read_record_file
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.trainer.data.sequence_packer import Microbatch, SequencePacker
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.loss import negative_log_likelihood
from megatron_webrl.trainer.optimizer import make_optimizer
from megatron_webrl.types import Group, Trajectory

log = logging.getLogger(__name__)


def warm_start(learner: Learner, builder: SequencePacker, config: Config, control: ControlClient) -> Learner:
    """Train on demonstrations, of a file or the first worker's; returns the learner with a fresh optimiser for RL.

    Collective. Every rank reads the same file. Raises JobFailed if the demonstrations do not come or are of another
    model.
    """
    settings, dtype = config.trainer.warm_start, next(learner.chunks[0].parameters()).dtype
    control.report_status("waiting for demonstrations")
    control.wait_for_key(
        "demonstrations/ready", settings.timeout_seconds, "demonstrations from rollout-0", ("rollout-0",)
    )
    records = islice(read_record_file(config.demonstrations_path), settings.demonstrations)
    demonstrations = [decode_trajectory(record, copy=True) for record in records]
    if len(demonstrations) < settings.demonstrations:
        raise JobFailed(
            f"{config.demonstrations_path} holds {len(demonstrations)} demonstrations, fewer than "
            f"trainer.warm_start.demonstrations={settings.demonstrations}"
        )
    _check_tokens(demonstrations[0], builder.processor, config.demonstrations_path)
    groups = [Group(t.ticket, (t,)) for t in demonstrations]
    samples = batching.make_samples(groups, batching.demonstration_advantages)
    rate = replace(config.trainer.optimizer, learning_rate=settings.learning_rate, warmup_fraction=0.05)
    per_epoch = -(-len(samples) // settings.samples_per_update)
    learner = replace(learner, optimizer=make_optimizer(learner.chunks, rate, settings.epochs * per_epoch, dtype))
    started, step = time.monotonic(), 0
    for rows in _one_ahead(_rows(builder, samples, config)):
        metrics, _ = learner.train_step(rows, None, negative_log_likelihood)
        step += 1
        control.report_status(f"warm start, step {step} of {settings.epochs * per_epoch}, loss {metrics['loss']:.3f}")
        control.check_job()
    log.info(
        "warm start: %d steps on %d samples in %.1f s (%.1f s of them waiting for pixels), loss %.4f",
        step,
        len(samples),
        time.monotonic() - started,
        builder.wait_timer.pop_seconds(),
        metrics["loss"],
    )
    rl = make_optimizer(learner.chunks, config.trainer.optimizer, config.trainer.optimizer_steps, dtype)
    return replace(learner, optimizer=rl)


def _rows(builder: SequencePacker, samples: Sequence[TrainingSample], config: Config) -> Iterator[list[Microbatch]]:
    """The rows of each optimiser step: all samples once an epoch, in an order of its own."""
    settings = config.trainer.warm_start
    for epoch in range(settings.epochs):
        order = random.Random(config.run.seed + epoch).sample(range(len(samples)), len(samples))
        for first in range(0, len(order), settings.samples_per_update):
            part = [samples[i] for i in order[first : first + settings.samples_per_update]]
            yield builder.build(part, "token_mean", 1)


def _one_ahead(parts: Iterator[list[Microbatch]]) -> Iterator[list[Microbatch]]:
    """The same, each asked for one step early: its pixels are made while the step before it is computed."""
    ahead = next(parts, None)
    while ahead is not None:
        rows, ahead = ahead, next(parts, None)
        yield rows


def _check_tokens(demonstration: Trajectory, processor: Processor, path: Path) -> None:
    """Raises JobFailed if the answers' tokens mean another text than the one that they were made of."""
    for step in demonstration.steps:
        again = processor.encode_response(processor.decode(step.response_token_ids[:-1]))
        if again.tolist() != step.response_token_ids.tolist():
            raise JobFailed(f"{path} was made with another tokenizer than that of model.path; make it anew")
