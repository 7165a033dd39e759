"""Rank bodies of the step critic's tests: the same updates, checkpoints and resumes in every layout."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.schema import Config
from megatron_webrl.types import Group
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trainer.learner_ranks import VERSION, make_config, make_groups, make_learner

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tensor_parallel": 2},
    "dp2": {"data_parallel": 2},
    "cp2": {"context_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
}
SAVED_IN = "tp2"
LEARNING_UPDATES = 12
STEPS = 4  # of an update: two epochs of two minibatches


def across_layouts(rank: int, folder: str, model: str) -> None:
    """Two updates in each layout, the second also resumed from the checkpoint of the first layout."""
    torchvision_shim.install()
    platform = gloo.join(rank, 2, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.trainer.parallel import all_gather_object, parallel_sizes

    for name, layout in LAYOUTS.items():
        config = critic_config(model)
        for key, value in layout.items():
            setattr(config.trainer, key, value)
        process_groups.init_process_groups(parallel_sizes(config), seed=1)
        found = all_gather_object(_updates(config, platform, Path(folder), saves=name == SAVED_IN))
        if rank == 0:
            torch.save(found, Path(folder) / f"found-{name}.pt")
        process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def on_one_rank(rank: int, folder: str, model: str) -> None:
    """Learning, warm-up, half precision, and what a checkpoint with another critic says; written to found.pt."""
    torchvision_shim.install()
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes(), seed=1)
    config = critic_config(model)
    found = {
        "learning": _learning(copy.deepcopy(config), platform),
        "warm-up": [_warm_up(copy.deepcopy(config), platform, trunk) for trunk in (True, False)],
        "half": _half_precision(copy.deepcopy(config), platform, Path(folder)),
        "others": _other_checkpoints(copy.deepcopy(config), platform, Path(folder)),
    }
    torch.save(found, Path(folder) / "found.pt")
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def critic_config(model: str) -> Config:
    config = make_config(model)
    config.trainer.advantage = advantage_config("critic", discount=0.5)
    return config


def weights_of(learner: Any) -> dict[str, torch.Tensor]:
    """Weights of the policy by Hugging Face name, and of the value head."""
    from megatron_webrl.trainer.parallel import broadcast_from_last_stage
    from tests.model.hf_export import hf_tensors

    weights = {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}
    head = learner.models[-1].value_head
    weights["value_head"] = broadcast_from_last_stage(None if head is None else head.weight.detach().clone())
    return weights


def _update(learner: Any, config: Config, platform: Any, groups: list[Group]) -> dict[str, float]:
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer

    metrics: dict[str, float] = train_batch(learner, make_sequence_packer(config, platform), config, groups, VERSION)[0]
    return metrics


def _save(learner: Any, config: Config, run_folder: Path) -> Path:
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState

    checkpoints = Checkpointer(run_folder / "checkpoints", Path(config.model.path), config.trainer.checkpoint)
    checkpoints.start_save(learner, TrainerState(VERSION, 0, 0, (), Accounting().state_dict(), 0))
    checkpoints.close()
    return latest_checkpoint(run_folder)


def _updates(config: Config, platform: Any, folder: Path, saves: bool) -> dict[str, Any]:
    from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    learner, groups = make_learner(config, platform), make_groups(config)
    found: dict[str, Any] = {"metrics": [_update(learner, config, platform, groups)]}
    if saves:
        _save(learner, config, folder / "run")
    found["metrics"].append(_update(learner, config, platform, groups))
    found["weights"] = weights_of(learner)
    resumed = make_learner(config, platform)
    load_learner(latest_checkpoint(folder / "run"), resumed)
    found["resumed metrics"] = _update(resumed, config, platform, groups)
    found["resumed weights"] = weights_of(resumed)
    return found


def _learning(config: Config, platform: Any) -> list[dict[str, float]]:
    """Successes of two steps: with a discount of 0.5 their returns are 0.5 and 1. Only the head is trained."""
    config.trainer.epochs = config.trainer.minibatches = 1
    config.trainer.updates = 1000
    config.trainer.optimizer.learning_rate, config.trainer.optimizer.schedule = 0.02, "constant"
    config.trainer.advantage = advantage_config(
        "critic", discount=0.5, coefficient=1.0, train_trunk=False, warmup_updates=VERSION + 1
    )
    groups = [
        Group(group.ticket, tuple(_success(t) for t in group.trajectories if len(t.steps) == 2))
        for group in make_groups(config, 6)
    ]
    learner = make_learner(config, platform)
    return [_update(learner, config, platform, groups) for _ in range(LEARNING_UPDATES)]


def _success(trajectory: Any) -> Any:
    return replace(trajectory, reward=1.0, outcome="success")


def _warm_up(config: Config, platform: Any, train_trunk: bool) -> dict[str, Any]:
    """Of an update of the warm-up and of a later one: the largest change of a weight of the head and of the policy, and
    the policy's Adam steps.
    """
    config.trainer.advantage = advantage_config(
        "critic", discount=0.5, train_trunk=train_trunk, warmup_updates=VERSION + 1
    )
    learner, groups = make_learner(config, platform), make_groups(config)
    changes = []
    for warmup_updates in (VERSION + 1, VERSION):
        config.trainer.advantage.warmup_updates = warmup_updates
        before = weights_of(learner)
        _update(learner, config, platform, groups)
        change = {name: float((each - before[name]).abs().max()) for name, each in weights_of(learner).items()}
        changes.append((change.pop("value_head"), max(change.values()), learner.optimizer.step_count))
    return {"warm-up": changes[0], "later": changes[1]}


def _converted(checkpoint: Path, target: Path) -> list[str]:
    """Names of the tensors of a checkpoint in Hugging Face's format."""
    from safetensors import safe_open

    from megatron_webrl.model.convert.conversion import ConversionOptions, megatron_to_hf

    megatron_to_hf(checkpoint, target, 2**30, ConversionOptions())
    names: list[str] = []
    for file in target.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names += tensors.keys()
    return sorted(names)


def _half_precision(config: Config, platform: Any, folder: Path) -> dict[str, Any]:
    """An update in bfloat16, whose head is in float32, then one more with and without a resume."""
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    config.model.dtype = "bfloat16"
    learner, groups = make_learner(config, platform), make_groups(config)
    _update(learner, config, platform, groups)
    checkpoint = _save(learner, config, folder / "half")
    straight, resumed = _update(learner, config, platform, groups), make_learner(config, platform)
    load_learner(checkpoint, resumed)
    return {
        "dtypes": {str(p.dtype): name for name, p in learner.models[-1].named_parameters()},
        "straight": straight,
        "resumed": _update(resumed, config, platform, groups),
        "heads": [each.models[-1].value_head.weight.detach().clone() for each in (learner, resumed)],
    }


def _other_checkpoints(config: Config, platform: Any, folder: Path) -> dict[str, Any]:
    """Errors of resumes with and without a critic from checkpoints of the other kind, and starts from their weights."""
    from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    plain = copy.deepcopy(config)
    plain.trainer.advantage = advantage_config()
    found: dict[str, Any] = {}
    for name, of_checkpoint, of_run in (("no critic", plain, config), ("critic", config, plain)):
        learner = make_learner(of_checkpoint, platform)
        _update(learner, of_checkpoint, platform, make_groups(config))
        checkpoint = _save(learner, of_checkpoint, folder / name)
        try:
            load_learner(checkpoint, make_learner(of_run, platform))
        except CheckpointError as error:
            found[name] = str(error)
        of_run.model.checkpoint = str(checkpoint)
        started, trained = weights_of(make_learner(of_run, platform)), weights_of(learner)
        of_run.model.checkpoint = ""
        found[f"{name}, head"] = started.pop("value_head")
        found[f"{name}, weights"] = all(torch.equal(each, trained[key]) for key, each in started.items())
        if name == "critic":
            found["converted"], found["expected"] = _converted(checkpoint, folder / "hf"), sorted(started)
    return found
