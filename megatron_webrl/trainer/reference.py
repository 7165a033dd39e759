"""The reference policy of the KL penalty: the weights at the start of RL, kept on disk for a resumed run."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.checkpoint.checkpoint_state import (
    load_weights,
    one_line_error,
    plan_checkpoint,
    run_on_first_rank,
    sharded_weights,
    write_metadata,
)
from megatron_webrl.trainer.learner import ReferencePolicy
from megatron_webrl.trainer.parallel import all_gather_object, broadcast_object
from megatron_webrl.util import atomic_file

log = logging.getLogger(__name__)


def make_reference(chunks: list[Any], config: Config) -> ReferencePolicy | None:
    """The policy at the start of the run as the reference of the KL penalty; None without one. Collective.

    In a fresh run the chunks have its weights; after a warm start they are stored. In a resumed one, before its
    checkpoint loads, they have those of model.path or model.checkpoint: the reference unless one is stored. Raises
    CheckpointError on failure.
    """
    if not config.trainer.loss.kl_coefficient:
        return None
    if not config.run.resume and config.trainer.warm_start.demonstrations:
        store_reference(config.reference_weights_folder, chunks, Path(config.model.path))
    elif config.run.resume and broadcast_object(config.reference_weights_folder.exists()):
        load_weights(config.reference_weights_folder, chunks)
    return ReferencePolicy([chunk.module for chunk in chunks])


def store_reference(path: Path, chunks: list[Any], model_folder: Path) -> None:
    """Write the weights as a Megatron checkpoint, which appears under its name once complete. Collective.

    `model_folder`: its Hugging Face configuration files are copied along. Raises CheckpointError on every rank.
    """
    temporary = path.with_name(f".{path.name}")
    _run_on_first_rank(path, lambda: files.make_empty_folder(temporary))
    plan = plan_checkpoint(sharded_weights(chunks), temporary, validate=True)
    locations: list[Any] | str
    try:
        locations = plan.write_task()()
    except OSError as error:
        locations = one_line_error(error)
    outcomes = all_gather_object(locations)

    def complete() -> None:
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, str):
                raise CheckpointError(f"rank {rank}: {outcome}")
        write_metadata(temporary, plan.common, {}, model_folder)
        plan.write_index([outcome for outcome in outcomes if not isinstance(outcome, str)])
        shutil.rmtree(path, ignore_errors=True)  # left by a trainer that died before its first checkpoint
        atomic_file.publish(temporary, path)

    _run_on_first_rank(path, complete)
    if torch.distributed.get_rank() == 0:
        log.info("stored the weights at the start of RL in %s as the reference", path)


def _run_on_first_rank(path: Path, action: Callable[[], object]) -> None:
    _, error = run_on_first_rank(action)
    if error is not None:
        raise CheckpointError(f"the reference {path} could not be written: {error}")
