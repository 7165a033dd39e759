"""Segments that killed engines leave in shared memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from megatron_webrl.launch.run_folder import sweep_engine_segments

NAME = "vllm_dist_0af3-tp-[0-1]-cpushm_{}"


def test_only_segments_of_engines_that_no_process_maps_are_removed(tmp_path: Path) -> None:
    for name in (NAME.format(0), NAME.format(1), "vllm_dist_0af3", "webrl-run-0"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    with open(tmp_path / NAME.format(1), "r+b") as file, mmap.mmap(file.fileno(), 0):
        assert sweep_engine_segments(tmp_path) == [NAME.format(0)]
        assert sorted(os.listdir(tmp_path)) == ["vllm_dist_0af3", NAME.format(1), "webrl-run-0"]
    assert sweep_engine_segments(tmp_path) == [NAME.format(1)]
