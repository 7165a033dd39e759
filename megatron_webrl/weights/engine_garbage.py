"""Garbage collection in the processes of an engine, which is off while they import vLLM (system/_site)."""

from __future__ import annotations

import gc


def collect_garbage() -> None:
    """Collect garbage from here on. What has been imported stays, and vLLM's own collections do not look at it."""
    gc.freeze()
    gc.enable()
