"""The estimate of what a job reads at its start, and the timeouts of the configurations for clusters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.prediction import StartEstimate

ROOT = Path(__file__).parents[2]
CLUSTERS = sorted((ROOT / "configs").glob("*node.yaml"))


def estimate(parameters: int, *overrides: str) -> tuple[StartEstimate, list[str]]:
    config = parse_config(None, list(overrides))
    found = StartEstimate.of_config(config, parameters)
    return found, found.lines(config)


def test_training_reads_one_copy_and_the_optimizer_if_resumed() -> None:
    bfloat16, lines = estimate(10**9, "model.dtype=bfloat16", "cluster.nodes=4")
    assert bfloat16 == StartEstimate(2 * 10**9, 14 * 10**9)  # weights; main weights and two moments, 4 bytes each
    assert lines[0].endswith("about 1 s at 2 GB/s; resumed 13 GiB, 7 s")
    assert estimate(10**9)[0] == StartEstimate(4 * 10**9, 12 * 10**9)


def test_an_evaluation_reads_a_copy_for_each_node_and_saves_nothing() -> None:
    found, [line] = estimate(10**9, "evaluation.only=true", "cluster.nodes=4", "model.dtype=bfloat16")
    assert found == StartEstimate(8 * 10**9, 8 * 10**9)
    assert "resumed" not in line


def test_a_short_timeout_is_named() -> None:
    _, (start, save) = estimate(10**10, "model.dtype=bfloat16")
    assert start.endswith("resumed 130 GiB, 70 s")
    assert save == "checkpoint: writes 130 GiB, about 70 s"
    _, (start, _) = estimate(10**11, "model.dtype=bfloat16")
    assert start.endswith("run.startup_timeout_seconds=600 is short, set it to 1700 or more")


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_every_configuration_for_a_cluster_has_the_time_to_start_and_to_save(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["placement", str(path), "--memory", "--json", str(tmp_path / "placement.json")]) == 0
    lines = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("start: reads ", "checkpoint: writes "))
    ]
    assert len(lines) == 2
    assert "is short" not in "".join(lines)
    start = json.loads((tmp_path / "placement.json").read_text())["start"]
    assert start["resumed_bytes"] == 7 * start["new_bytes"]
    if path.stem == "235b_a22b_32node":
        assert "\n".join(lines) in (ROOT / "docs" / "slurm.md").read_text()
