"""Profiles of chosen updates on chosen ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.track.timeline import PROFILES, Timeline
from megatron_webrl.trainer.telemetry import profiled


def test_only_chosen_updates_of_the_first_rank_are_profiled(tmp_path: Path) -> None:
    config, timeline = Config(), Timeline(recording=True)
    config.run.directory, config.run.name = str(tmp_path), "profiled"
    config.trainer.profile_updates = [3]
    config.run_folder.mkdir()
    weights = torch.ones(8, 8, requires_grad=True)
    for rank, version in ((0, 2), (1, 3), (0, 3)):
        with profiled(config, rank, version, timeline):
            (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
    assert [span[0] for span in timeline.take()] == ["profile", "write profile"]
    (file,) = (config.run_folder / PROFILES).iterdir()
    assert file.name == "update-000003.trainer-0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    assert sum(event["name"] == "aten::mm" for event in events) == 3  # one forward, two backward
