"""Warm start: imitate scripted episodes before RL, so that some of the first groups succeed."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import replace

from megatron_webrl.config import Config
from megatron_webrl.control import Control
from megatron_webrl.ring.record import decode
from megatron_webrl.ring.record_file import read_record_file
from megatron_webrl.trainer import batching
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.loss import likelihood
from megatron_webrl.trainer.optimizer import optimization
from megatron_webrl.trainer.rows import RowBuilder
from megatron_webrl.types import Group

log = logging.getLogger(__name__)


def warm_start(learner: Learner, builder: RowBuilder, config: Config, control: Control) -> Learner:
    """Train on the demonstrations that the first worker writes; returns the learner with a fresh optimiser for RL.

    Collective. Every rank reads the same file. Raises JobFailed if the demonstrations do not come.
    """
    settings, dtype = config.trainer.warm_start, next(learner.chunks[0].parameters()).dtype
    control.report("waiting for demonstrations")
    control.wait_key("demonstrations/ready", settings.seconds, "demonstrations from rollout-0", ("rollout-0",))
    demonstrations = [decode(record, copy=True) for record in read_record_file(config.demonstrations_path)]
    groups = [Group(t.ticket, (t,)) for t in demonstrations]
    samples = batching.samples_of(groups, batching.imitation)
    rate = replace(config.trainer.optimizer, learning_rate=settings.learning_rate, warmup_fraction=0.05)
    per_epoch = -(-len(samples) // settings.samples_per_update)
    learner = replace(learner, optimization=optimization(learner.chunks, rate, settings.epochs * per_epoch, dtype))
    started, step = time.monotonic(), 0
    for epoch in range(settings.epochs):
        order = random.Random(config.run.seed + epoch).sample(range(len(samples)), len(samples))
        for first in range(0, len(order), settings.samples_per_update):
            part = [samples[i] for i in order[first : first + settings.samples_per_update]]
            metrics, _ = learner.step(builder.build(part, "token_mean", k=1), None, likelihood)
            step += 1
            control.report(f"warm start, step {step} of {settings.epochs * per_epoch}, loss {metrics['loss']:.3f}")
            control.check()
    log.info(
        "warm start: %d steps on %d samples in %.1f s, loss %.4f",
        step,
        len(samples),
        time.monotonic() - started,
        metrics["loss"],
    )
    rl = optimization(learner.chunks, config.trainer.optimizer, config.trainer.optimizer_steps, dtype)
    return replace(learner, optimization=rl)
