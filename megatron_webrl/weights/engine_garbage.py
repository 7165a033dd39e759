"""Garbage collection of processes that import an engine or a trainer: off meanwhile, as it is a fifth of that time.

Roles turn it off themselves, an engine's own processes in system/_site.
"""

from __future__ import annotations

import gc


def collect_garbage() -> None:
    """Collect garbage from here on. What has been imported stays, and later collections do not look at it."""
    gc.freeze()
    gc.enable()
