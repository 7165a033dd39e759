"""Where the reference policy comes from: the start of the run, also after a resume."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.checkpoint import checkpoint_files as files
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.checkpoint.checkpoint_plan import plan_checkpoint, write_metadata
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_weights, sharded_weights
from megatron_webrl.trainer.checkpoint.forked_task import one_line_error
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.trainer.reference import ReferencePolicy

log = logging.getLogger(__name__)


def attach_reference_policy(learner: Learner, config: Config) -> Learner:
    """The learner with the policy of the run's start as its reference, if the loss has one. Collective.

    In a fresh run the learner is that policy; what a warm start has made of the weights is stored with the run. In
    a resumed run, before its checkpoint is loaded, it holds model.path or model.checkpoint, which is that policy
    unless one is stored. Raises CheckpointError if it cannot be stored or read.
    """
    if not config.trainer.loss.kl_coefficient:
        return learner
    if not config.run.resume and config.trainer.warm_start.demonstrations:
        store_reference(config.reference_weights_folder, learner.chunks, Path(config.model.path))
    elif config.run.resume and broadcast_object(config.reference_weights_folder.exists()):
        load_weights(config.reference_weights_folder, learner.chunks)
    return replace(learner, reference=ReferencePolicy(learner.models))


def store_reference(path: Path, chunks: list[Any], model: Path) -> None:
    """Write the weights alone as a Megatron checkpoint, which appears under its name when it is complete. Collective.

    `model`: the Hugging Face folder whose description goes along. Raises CheckpointError on every rank.
    """
    first, temporary = torch.distributed.get_rank() == 0, path.with_name(f".{path.name}")
    _on_first(path, lambda: files.make_empty_folder(temporary))
    plan = plan_checkpoint(sharded_weights(chunks), temporary, validate=True)
    outcome: tuple[list[Any], str | None]
    try:
        outcome = (plan.take_write_task()(), None)
    except OSError as error:
        outcome = ([], one_line_error(error))
    outcomes: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(outcomes, outcome)
    for rank, (_, reason) in enumerate(outcomes):
        if reason is not None:
            raise CheckpointError(f"the reference {path} could not be written: rank {rank}: {reason}")

    def complete() -> None:
        write_metadata(temporary, plan.common, {}, model)
        plan.write_index([results for results, _ in outcomes])
        shutil.rmtree(path, ignore_errors=True)  # that of a trainer that died before its first checkpoint
        temporary.rename(path)
        files.fsync(path.parent)

    _on_first(path, complete)
    if first:
        log.info("the weights that RL starts from are stored in %s as the reference", path)


def _on_first(path: Path, action: Callable[[], object]) -> None:
    """Do something on the first rank's disk; what fails there is raised on every rank."""
    trouble = None
    if torch.distributed.get_rank() == 0:
        try:
            action()
        except OSError as error:
            trouble = one_line_error(error)
    if (trouble := broadcast_object(trouble)) is not None:
        raise CheckpointError(f"the reference {path} could not be written: {trouble}")
