"""Profiles of updates, and their place in the trace of the timeline."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.monitor.timeline.processes import read_timeline
from megatron_webrl.monitor.timeline.trace import trace_events
from megatron_webrl.track.timeline import FOLDER, PROFILE_MARK, PROFILES, Timeline, TimelineFiles
from megatron_webrl.trainer.profile import profiled

VERSION, RANK = 3, 1


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = Config()
    config.run.directory, config.run.name = str(tmp_path), "profiled"
    config.trainer.profile.updates, config.trainer.profile.ranks = [VERSION], [RANK]
    config.run_folder.mkdir()
    return config


@pytest.fixture
def timeline(config: Config) -> Timeline:
    """A timeline with a profiled update."""
    timeline = Timeline(recording=True)
    files = TimelineFiles(config.run_folder / FOLDER, f"trainer-{RANK}", 0, timeline)
    with timeline.span("pack"):
        pass
    weights = torch.ones(8, 8, requires_grad=True)
    with profiled(config, RANK, VERSION, timeline), timeline.span("train", version=VERSION):
        (weights @ weights).sum().backward()  # type: ignore[no-untyped-call]
    files.close()
    return timeline


def test_only_chosen_updates_of_chosen_ranks_are_profiled(config: Config) -> None:
    timeline = Timeline(recording=True)
    for rank, version in ((RANK, VERSION - 1), (RANK - 1, VERSION)):
        with profiled(config, rank, version, timeline):
            pass
    assert timeline.take() == []
    assert not (config.run_folder / PROFILES).exists()


@pytest.mark.usefixtures("timeline")
def test_the_trace_shows_what_torch_did_within_the_update(config: Config) -> None:
    processes = read_timeline(config.run_folder)
    plain = trace_events(processes)
    events = trace_events(processes, None, config.run_folder / PROFILES)
    assert events[: len(plain)] == plain
    train = next(event for event in events if event["name"] == "train")
    added = events[len(plain) :]
    assert {event["pid"] for event in added}.isdisjoint(event["pid"] for event in plain)
    products = [event for event in added if event["name"] == "aten::mm"]
    assert len(products) == 3  # one forward, two backward
    span, mark = (next(event for event in events if event["name"] == name) for name in ("profile", PROFILE_MARK))
    error = (mark["dur"] - span["dur"]) / 2 + 2  # and rounding
    for event in products:
        assert train["ts"] - error <= event["ts"] <= event["ts"] + event["dur"] <= train["ts"] + train["dur"] + error
    named = {event["pid"]: event["args"]["name"] for event in added if event["name"] == "process_name"}
    assert named[products[0]["pid"]].startswith(f"trainer-{RANK}, update {VERSION}, torch, ")
    rows = {(event["pid"], event["tid"]) for event in added if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in products} <= rows


@pytest.mark.usefixtures("timeline")
def test_a_profile_that_is_cut_is_named_and_one_that_is_gone_is_left_out(config: Config) -> None:
    (file,) = (config.run_folder / PROFILES).iterdir()
    assert file.name == "update-000003.trainer-1.json.gz"
    processes = read_timeline(config.run_folder)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match=rf"{file} is no profile of torch"):
        trace_events(processes, None, file.parent)
    file.unlink()
    assert trace_events(processes, None, file.parent) == trace_events(processes)
