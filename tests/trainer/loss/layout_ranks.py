"""Rank bodies of the loss layout test: one update with each loss after the other, in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.types import Group
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trainer.learner_ranks import VERSION, make_config, make_groups, make_learner

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"data_parallel": 2},
    "cp2": {"context_parallel": 2},
    "tp2": {"tensor_parallel": 2},
}
CLIPS = {"clip_low": 1e-3, "clip_high": 1e-3, "importance_weight_cap": 1e9}
LOSSES = {
    "cispo": loss_config(
        "cispo", **CLIPS, importance_weight_level="product", importance_weight_floor=0.02, kl_rejection_bound=0.5,
    ),
    "sapo": loss_config(name="sapo", importance_weight_level="geometric", entropy_coefficient=0.5),
    "dppo": loss_config(name="dppo", decoupled=False, max_token_lag=1, dppo_bound=1e-4),
    "raft_plus_plus": loss_config(
        "raft_plus_plus", clip_high=1e-3, importance_weight_cap=1e9, normalizer="async_webrl_per_trajectory"
    ),
    "gspo": loss_config("gspo", **CLIPS, importance_weight_level="product", kl_rejection_bound=1.2),
}  # fmt: skip


def run(rank: int, folder: str, model: str) -> None:
    """Write the metrics of each loss in each layout to found.pt."""
    torchvision_shim.install()
    platform = gloo.join(rank, 2, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer
    from megatron_webrl.trainer.parallel import parallel_sizes

    found: dict[str, dict[str, dict[str, float]]] = {}
    for layout, sizes in LAYOUTS.items():
        config = make_config(model)
        for key, value in sizes.items():
            setattr(config.trainer, key, value)
        process_groups.init_process_groups(parallel_sizes(config), seed=1)
        groups = [_varied(group) for group in make_groups(config)]
        packer = make_sequence_packer(config, platform)
        learner = make_learner(config, platform)
        found[layout] = {}
        for name, loss in LOSSES.items():
            config.trainer.loss = loss
            found[layout][name] = train_batch(learner, packer, config, groups, VERSION)[0]
        process_groups.destroy_process_groups()
    if rank == 0:
        torch.save(found, Path(folder) / "found.pt")
    torch.distributed.destroy_process_group()


def _varied(group: Group) -> Group:
    """The group with versions of several ages, and behaviour log-probabilities around its own."""

    def varied(trajectory: Any) -> Any:
        rng = np.random.default_rng((trajectory.ticket, trajectory.index))
        steps = [
            replace(
                step,
                versions=rng.integers(-1, VERSION + 1, len(step.versions)).astype(np.int32),
                logprobs=(step.logprobs + rng.normal(0, 0.5, len(step.logprobs))).astype(np.float32),
            )
            for step in trajectory.steps
        ]
        return replace(trajectory, steps=tuple(steps))

    return replace(group, trajectories=tuple(map(varied, group.trajectories)))
