"""What the gloo process of the warm start's test does: the same warm start without workers for pixels and with one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_webrl import compat
from megatron_webrl.ring.record import encode
from megatron_webrl.ring.record_file import RecordFileWriter
from megatron_webrl.types import Step
from tests import gloo
from tests.planes import connect, control_plane
from tests.trainer.learner_ranks import make_config, make_groups


def run(rank: int, folder: str, model: str) -> None:
    """Write the weights of each warm start to weights-WORKERS.pt, under their Hugging Face names."""
    compat.install()
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import groups
    from megatron_webrl.model.export import hf_tensors
    from megatron_webrl.model.layout import Sizes
    from megatron_webrl.model.processing import Processor
    from megatron_webrl.trainer.build import make_builder, make_learner, with_pixels_ahead
    from megatron_webrl.trainer.warm_start import warm_start

    groups.form(Sizes(), seed=1)
    config = make_config(model)
    config.run.directory = folder
    settings = config.trainer.warm_start
    settings.demonstrations, settings.epochs, settings.samples_per_update = 4, 2, 2
    placeholder = Processor.load(model).image_token_id
    with RecordFileWriter(config.demonstrations_path) as file:
        for group in make_groups(config):
            steps = tuple(_as_written(step, placeholder) for step in group.trajectories[0].steps)
            file.write(encode(replace(group.trajectories[0], steps=steps, reward=1.0, outcome="success")))
    with control_plane(Path(folder)) as address:
        control = connect(address, "trainer-0")
        control.put("demonstrations/ready", True)
        for workers in (0, 1):
            config.trainer.pixel_workers = workers
            builder = with_pixels_ahead(make_builder(config, platform), config, rank)
            learner = warm_start(make_learner(config, platform), builder, config, control)
            assert builder.preparation is None or builder.preparation.used == 0
            builder.close()
            weights = {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}
            torch.save(weights, Path(folder) / f"weights-{workers}.pt")
    groups.dissolve()
    torch.distributed.destroy_process_group()


def _as_written(step: Step, placeholder: int) -> Step:
    """The step without the token for images in its response, which no script writes."""
    kept = step.response_token_ids != placeholder
    arrays = {name: getattr(step, name)[kept] for name in ("response_token_ids", "logprobs", "versions")}
    return replace(step, **arrays)
