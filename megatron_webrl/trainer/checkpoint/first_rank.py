"""Run file operations on the first rank, and report their errors on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.checkpoint.forked_task import one_line_error
from megatron_webrl.trainer.parallel import broadcast_object

Result = TypeVar("Result")


def run_on_first_rank(action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Call `action` on the first rank; returns its result and the error, one of them None, on every rank. Collective.

    Only OSError and CheckpointError count as errors; they become one line.
    """
    outcome: tuple[Result | None, str | None] = (None, None)
    if torch.distributed.get_rank() == 0:
        try:
            outcome = (action(), None)
        except OSError as error:
            outcome = (None, one_line_error(error))
        except CheckpointError as error:
            outcome = (None, str(error))
    return broadcast_object(outcome)
