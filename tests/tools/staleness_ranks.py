"""What the process of the staleness bench's test does: three updates of a tiny model that leave a run's files.

Engine and browser are missing: responses are words drawn at random, whose log-probabilities the model itself gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.track import summary
from megatron_webrl.types import Group, Step, Trajectory
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trainer.learner_ranks import make_config, make_groups

UPDATES, GROUPS = 3, 3


def configuration(folder: Path, model: str) -> Config:
    """Two minibatches in mode sync, with a rate at which three updates change the policy a good deal."""
    config = make_config(model)
    config.run.directory, config.run.name = str(folder), "run"
    config.trainer.updates, config.trainer.epochs, config.rollout.mode = UPDATES, 1, "sync"
    config.trainer.optimizer.schedule, config.trainer.optimizer.warmup_fraction = "constant", 0.0
    config.trainer.optimizer.learning_rate = 1e-3
    return config


def run(rank: int, folder: str, model: str) -> None:
    """Leave `run` and found.pt in the folder."""
    torchvision_shim.install()
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes(), seed=1)
    config = configuration(Path(folder), model)
    config.run_folder.mkdir()
    save_config(config, config.run_folder / "config.yaml")
    torch.save(_train(config, platform), Path(folder) / "found.pt")
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _train(config: Config, platform: Any) -> dict[str, Any]:
    """The updates; then the gradient of a batch, whole and as the mean of its groups'."""
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
    from megatron_webrl.trainer.data import replay_buffer
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import load_model, make_learner, make_sequence_packer

    learner, builder = make_learner(config, load_model(config, platform)), make_sequence_packer(config, platform)
    checkpoints = Checkpointer(config.run_folder / "checkpoints", Path(config.model.path), config.trainer.checkpoint)
    updates, batch = [], make_groups(config, GROUPS)
    for version in range(UPDATES):
        batch = [_played(group, version, learner, builder) for group in batch]
        replay_buffer.write_trajectories(
            replay_buffer.group_file_path(config.records_folder, version),
            (t for group in batch for t in group.trajectories),
        )
        if version == UPDATES - 1:
            found = _gradients(config, learner, builder, batch, version)
        metrics, _ = train_batch(learner, builder, config, batch, version)
        figures = {"gradient_norm": metrics["gradient_norm"]}
        clipped = metrics["clipped"] / metrics["response_tokens"]
        updates.append({"version": version + 1, "clip_fraction": clipped, "extra": figures})
        if version == UPDATES - 2:  # the version that has all groups before it
            checkpoints.start_save(learner, TrainerState(version + 1, 0, 0, (), Accounting().state_dict(), 0))
    checkpoints.close()
    summary.open_updates(config.run_folder).append(*updates)
    return found


def _played(group: Group, version: int, learner: Any, builder: Any) -> Group:
    """The group as policy `version` would have it: its log-probabilities, its number."""
    return Group(group.ticket, tuple(replace(t, steps=tuple(_steps(t, version, learner, builder)))
                                     for t in group.trajectories))  # fmt: skip


def _steps(trajectory: Trajectory, version: int, learner: Any, builder: Any) -> Iterator[Step]:
    from megatron_webrl.trainer.data.batching import demonstration_advantages, make_samples

    samples = make_samples([Group(trajectory.ticket, (trajectory,))], demonstration_advantages)
    for step, sample in zip(trajectory.steps, samples, strict=True):
        (logprobs,) = learner.compute_logprobs(builder.build([sample], "token_mean", 1))
        yield replace(step, logprobs=logprobs.numpy(), versions=np.full(len(logprobs), version, np.int32))


def _gradients(config: Config, learner: Any, builder: Any, batch: list[Group], version: int) -> dict[str, Any]:
    from megatron_webrl.trainer.data.batching import training_samples
    from megatron_webrl.trainer.loss.objective import make_objective
    from tools.bench.ranks.staleness_rank import flat_gradient, group_gradients, mean_and_covariance_trace

    found = {}
    for normaliser in ("constant", "token_mean"):
        loss = replace(config.trainer.loss, normalizer=normaliser)
        chosen = replace(config, trainer=replace(config.trainer, loss=loss))
        rows = builder.build(training_samples(batch, chosen, version), normaliser, loss.normalizer_constant)
        learner.forward_backward(rows, None, make_objective(loss, None))
        whole = flat_gradient(learner).double()
        mean, trace = mean_and_covariance_trace(group_gradients(learner, builder, chosen, batch, version))
        found[normaliser] = {"whole": whole, "mean": mean, "trace": trace}
    return found
