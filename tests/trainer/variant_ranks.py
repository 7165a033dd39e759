"""Process of the loss variant tests: a learner with a reference policy, GSPO, RAFT and a teacher."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.types import Trajectory
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trainer.learner_ranks import VERSION, make_config, make_groups, make_learner


def run(rank: int, folder: str, model: str) -> None:
    """Write found.pt."""
    torchvision_shim.install()
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes(), seed=1)
    found = {"reference": _reference(Path(folder), model, platform), "variants": _variants(model, platform)}
    found["distillation"] = _distillation(model, platform)
    torch.save(found, Path(folder) / "found.pt")
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _reference(folder: Path, model: str, platform: Any) -> dict[str, Any]:
    """A run with a warm start of one update; three updates with the penalty; a checkpoint; a resumed run."""
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
    from megatron_webrl.trainer.reference import make_reference

    config = make_config(model)
    config.run.directory = str(folder)
    config.run_folder.mkdir(parents=True)
    config.trainer.epochs = config.trainer.minibatches = 1
    config.trainer.optimizer.schedule, config.trainer.optimizer.warmup_fraction = "constant", 0.0
    learner = make_learner(config, platform)
    _update(learner, config, platform)
    config.trainer.warm_start.demonstrations, config.trainer.loss.kl_coefficient = 1, 0.1
    rows = _microbatches(config, platform)
    found: dict[str, Any] = {"start": learner.compute_logprobs(rows)}
    learner = replace(learner, reference=make_reference(learner.chunks, config))
    found["figures"] = [_update(learner, config, platform) for _ in range(3)]
    before, scores = _weights(learner), learner.compute_logprobs(rows)
    (found["reference"],) = learner.compute_reference_logprobs([rows])
    found["moved"] = max(float((a - b).abs().max()) for a, b in zip(scores, found["start"], strict=True))
    found["weights unchanged"] = all(map(torch.equal, before, _weights(learner)))
    found["strong"] = _divergence(learner, config, platform, 30.0)

    checkpoints = Checkpointer(config.run_folder / "checkpoints", Path(model), config.trainer.checkpoint)
    checkpoints.start_save(learner, TrainerState(VERSION, 0, 0, (), Accounting().state_dict(), 0))
    checkpoints.close()
    config.run.resume = True
    resumed = make_learner(config, platform)
    resumed = replace(resumed, reference=make_reference(resumed.chunks, config))
    load_learner(latest_checkpoint(config.run_folder), resumed)
    found["resumed"] = resumed.compute_logprobs(rows)
    found["at checkpoint"] = learner.compute_logprobs(rows)
    (found["resumed reference"],) = resumed.compute_reference_logprobs([rows])
    return found


def _divergence(learner: Any, config: Config, platform: Any, coefficient: float) -> list[float]:
    """Mean divergence per token before each of six updates with the given KL coefficient."""
    config.trainer.loss.kl_coefficient = coefficient
    figures = [_update(learner, config, platform) for _ in range(6)]
    return [metrics["reference_kl"] / metrics["response_tokens"] for metrics in figures]


def _variants(model: str, platform: Any) -> dict[str, Any]:
    """Updates of several losses on the same weights, at learning rate 0; and three updates with RAFT."""
    found: dict[str, Any] = {}
    config = make_config(model)
    config.trainer.optimizer.learning_rate = 0.0
    still = make_learner(config, platform)
    for name, changes in {
        "grpo": {},
        "gspo": {"name": "gspo"},
        "coupled": {"decoupled": False},
        "shuffled": {"shuffle_advantages": True},
    }.items():
        config = make_config(model)
        config.trainer.epochs = config.trainer.minibatches = 1
        config.trainer.loss = loss_config(importance_weight_cap=1e4, dual_clip=0.0, **changes)
        found[name] = _update(still, config, platform)
    config = make_config(model)
    config.trainer.loss = loss_config("raft")
    learner = make_learner(config, platform)
    found["raft"] = [_update(learner, config, platform) for _ in range(3)]
    return found


def _distillation(model: str, platform: Any) -> dict[str, Any]:
    """Eight updates by a teacher alone, which has imitated successes; the mean distance to it, in nats per token."""
    from megatron_webrl.trainer.data import batching
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer

    config = make_config(model)
    config.trainer.loss = loss_config("raft")
    teacher = make_learner(config, platform)
    for _ in range(4):
        _update(teacher, config, platform)
    config = make_config(model)
    config.trainer.epochs = config.trainer.minibatches = 1
    config.trainer.updates, config.trainer.optimizer.schedule = 8, "constant"
    config.trainer.optimizer.warmup_fraction = 0.0
    config.trainer.distillation.coefficient, config.trainer.distillation.rewards = 1.0, False
    student, packer = make_learner(config, platform), make_sequence_packer(config, platform)
    groups = make_groups(config)

    def scores(learner: Any) -> list[np.ndarray]:
        """Log-probabilities of each step's response."""
        samples = batching.training_samples(groups, config, VERSION)
        return [learner.compute_logprobs(packer.build([each], "token_mean", 10))[0].numpy() for each in samples]

    def distance() -> float:
        return float(np.abs(np.concatenate(scores(student)) - np.concatenate(wanted)).mean())

    wanted = scores(teacher)
    pairs = iter(zip(scores(student), wanted, strict=True))
    groups = [
        replace(group, trajectories=tuple(_with_logprobs(each, pairs) for each in group.trajectories))
        for group in groups
    ]
    distances = [distance()]
    updates = [train_batch(student, packer, config, groups, VERSION)[0] for _ in range(8)]
    return {"distances": [*distances, distance()], "updates": updates}


def _with_logprobs(trajectory: Trajectory, pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> Trajectory:
    """The trajectory with the next log-probabilities of student and teacher in its steps."""
    steps = []
    for step in trajectory.steps:
        student, teacher = next(pairs)
        steps.append(replace(step, logprobs=student, teacher_logprobs=teacher))
    return replace(trajectory, steps=tuple(steps))


def _update(learner: Any, config: Config, platform: Any) -> dict[str, float]:
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer

    return train_batch(learner, make_sequence_packer(config, platform), config, make_groups(config), VERSION)[0]


def _microbatches(config: Config, platform: Any) -> Any:
    from megatron_webrl.trainer.data import batching
    from megatron_webrl.trainer.main import make_sequence_packer

    samples = batching.make_samples(make_groups(config))
    return make_sequence_packer(config, platform).build(samples, "constant", 10)


def _weights(learner: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for model in learner.models for p in model.parameters()]
