"""Rank bodies of the learner's layout tests: the same updates in every layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trainer.learner_ranks import VERSION, make_config, make_groups, make_learner

GSPO = "gspo "
"""Layouts with ratios per response, whose tokens context-parallel ranks share, and with a reference policy."""
DENSE: dict[str, dict[str, int]] = {
    "dp2": {"data_parallel": 2},
    "tp2": {"tensor_parallel": 2},
    "cp2": {"context_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "gspo dp2": {"data_parallel": 2},
    "gspo cp2": {"context_parallel": 2},
    "gspo pp2": {"pipeline_parallel": 2},
}
SPARSE: dict[str, dict[str, int]] = {
    "dp2": {"data_parallel": 2},
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "ep2 tp2": {"tensor_parallel": 2, "expert_parallel": 2},
    "tp2 etp2": {"tensor_parallel": 2, "expert_tensor_parallel": 2},
    "tp2": {"tensor_parallel": 2},
    "cp2 ep2": {"context_parallel": 2, "expert_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
}
LAYOUTS = {"dense": DENSE, "sparse": SPARSE}
AHEAD = ("pp2 vpp2", "gspo cp2", "gspo pp2")
"""Layouts with image workers; in the others the ranks process images themselves."""


def run(rank: int, folder: str, models: dict[str, str]) -> None:
    """Write the observations of all ranks for each layout of each model to found-MODEL-LAYOUT.pt."""
    torchvision_shim.install()
    platform = gloo.join(rank, 2, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.trainer.parallel import all_gather_object, parallel_sizes

    for model, layouts in LAYOUTS.items():
        for name, layout in layouts.items():
            config = make_config(models[model])
            for key, value in layout.items():
                setattr(config.trainer, key, value)
            if name.startswith(GSPO):
                config.trainer.loss = loss_config(
                    name="gspo", clip_low=1e-3, clip_high=1e-3, importance_weight_cap=1e3, kl_coefficient=0.1
                )
            config.run.directory, config.trainer.image_workers = folder, int(name in AHEAD)
            process_groups.init_process_groups(parallel_sizes(config), seed=1)
            found = all_gather_object(_updates(config, platform))
            if rank == 0:
                torch.save(found, Path(folder) / f"found-{model}-{name}.pt")
            process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _updates(config: Any, platform: Any) -> dict[str, Any]:
    """Two updates of several optimiser steps each; returns metrics and weights."""
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer
    from megatron_webrl.trainer.reference import make_reference
    from tests.model.hf_export import hf_tensors

    learner = make_learner(config, platform)
    learner = replace(learner, reference=make_reference(learner.chunks, config))
    builder = make_sequence_packer(config, platform)
    figures = [train_batch(learner, builder, config, make_groups(config), VERSION) for _ in range(2)]
    held = None if builder.prefetcher is None else builder.prefetcher.used_bytes
    builder.close()
    weights = {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}
    return {"figures": figures, "weights": weights, "held": held}
