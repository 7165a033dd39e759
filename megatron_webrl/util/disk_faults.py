"""What a job does without when its disk is full, read-only or broken."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)


@contextmanager
def continue_without(what: str) -> Iterator[None]:
    """Log that `what` could not be written, instead of raising OSError."""
    try:
        yield
    except OSError as error:
        log.error("%s cannot be written: %s; the job continues without it", what, first_line(error))
