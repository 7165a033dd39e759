"""Profiles of chosen updates by torch's profiler: traces in Chrome's format, in profiles/ of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity

from megatron_webrl.config.schema import Config
from megatron_webrl.track.timeline import PROFILES, Timeline
from megatron_webrl.util.atomic_file import continue_without


@contextmanager
def profiled(config: Config, rank: int, version: int, timeline: Timeline) -> Iterator[None]:
    """Profile what trains `version`, if trainer.profile_updates has it and this is rank 0."""
    if rank or version not in config.trainer.profile_updates:
        yield
        return
    path = config.run_folder / PROFILES / f"update-{version:06d}.trainer-{rank}.json.gz"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with (
        torch.profiler.profile(activities=activities) as profiler,
        timeline.span("profile", version=version, file=path.name),
    ):
        yield
    with timeline.span("write profile"), continue_without(str(path)):
        path.parent.mkdir(exist_ok=True)
        profiler.export_chrome_trace(str(path))
