"""Rank body of the warm start test: the same warm start without and with an image worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.types import Step
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.job_control import connect, control_service
from tests.trainer.learner_ranks import make_config, make_groups


def run(rank: int, folder: str, model: str) -> None:
    """Write the weights of each warm start to weights-WORKERS.pt, under their Hugging Face names."""
    torchvision_shim.install()
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes
    from megatron_webrl.model.processor import Processor
    from megatron_webrl.trainer.main import load_model, make_sequence_packer
    from megatron_webrl.trainer.warm_start import warm_start
    from tests.model.hf_export import hf_tensors

    process_groups.init_process_groups(ParallelSizes(), seed=1)
    config = make_config(model)
    config.run.directory = folder
    settings = config.trainer.warm_start
    settings.demonstrations, settings.epochs, settings.samples_per_update = 4, 2, 2
    placeholder = Processor.load(model).image_token_id
    with RecordFileWriter(config.demonstrations_path) as file:
        for group in make_groups(config):
            steps = tuple(_as_written(step, placeholder) for step in group.trajectories[0].steps)
            file.write(encode_trajectory(replace(group.trajectories[0], steps=steps, reward=1.0, outcome="success")))
    with control_service(Path(folder)) as address:
        control = connect(address, "trainer-0")
        control.put_json("demonstrations/ready", True)
        for workers in (0, 1):
            config.trainer.image_workers = workers
            builder = make_sequence_packer(config, platform)
            chunks = load_model(config, platform)
            warm_start(chunks, builder, config, control)
            assert control.get_json("demonstrations/trained")
            assert builder.prefetcher is None or builder.prefetcher.used_bytes == 0
            builder.close()
            weights = {name: tensor.clone() for name, tensor in hf_tensors([chunk.module for chunk in chunks])}
            torch.save(weights, Path(folder) / f"weights-{workers}.pt")
    process_groups.destroy_process_groups()
    torch.distributed.destroy_process_group()


def _as_written(step: Step, placeholder: int) -> Step:
    """The step without image tokens in its response, which no script writes."""
    kept = step.response_token_ids != placeholder
    arrays = {name: getattr(step, name)[kept] for name in ("response_token_ids", "logprobs", "versions")}
    return replace(step, **arrays)
