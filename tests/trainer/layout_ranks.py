"""What the gloo processes of the learner's layout tests do: the same updates in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_webrl import compat
from tests import gloo
from tests.trainer.learner_ranks import VERSION, make_config, make_groups

DENSE: dict[str, dict[str, int]] = {
    "dp2": {"data_parallel": 2},
    "tp2": {"tensor_parallel": 2},
    "cp2": {"context_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "pp2 vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
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


def run(rank: int, folder: str, models: dict[str, str]) -> None:
    """Write what each layout of each model finds to found-MODEL-LAYOUT.pt: what every rank saw."""
    compat.install()
    platform = gloo.join(rank, 2, folder)
    from megatron_webrl.model import groups
    from megatron_webrl.trainer.parallel import sizes

    for model, layouts in LAYOUTS.items():
        for name, layout in layouts.items():
            config = make_config(models[model])
            for key, value in layout.items():
                setattr(config.trainer, key, value)
            groups.form(sizes(config), seed=1)
            everyone: list[Any] = [None, None]
            torch.distributed.all_gather_object(everyone, _updates(config, platform))
            if rank == 0:
                torch.save(everyone, Path(folder) / f"found-{model}-{name}.pt")
            groups.dissolve()
    torch.distributed.destroy_process_group()


def _updates(config: Any, platform: Any) -> dict[str, Any]:
    """Two updates of several optimiser steps each; figures, and on the first rank the weights."""
    from megatron_webrl.model.export import hf_tensors
    from megatron_webrl.trainer.build import make_builder, make_learner
    from megatron_webrl.trainer.loop import update

    learner, builder, batch = make_learner(config, platform), make_builder(config, platform), make_groups(config)
    figures = [update(learner, builder, config, batch, VERSION) for _ in range(2)]
    return {"figures": figures, "weights": {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}}
