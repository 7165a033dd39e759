"""The bench of staleness: its job's configuration, its checks, and a run of a tiny model measured offline."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.config.load import parse_config
from megatron_webrl.launch.validation import check_config
from megatron_webrl.trainer.data import replay_buffer
from tests.gloo import spawn
from tests.tools import staleness_ranks
from tests.trajectories import trajectory
from tools.bench import staleness
from tools.bench.ranks.staleness_rank import ObjectiveComparison, UpdateStats, mean_and_covariance_trace

ARM = UpdateStats(clipped=0.01, capped=0.0, gradient_norm=2.0, trace=6.0, signal=3.0)
FRESH = ObjectiveComparison(2, 0, 8, 1e-5, ARM, ARM, 0.0)


def test_the_job_is_valid_and_keeps_what_is_measured(tmp_path: Path) -> None:
    config = parse_config(staleness.CONFIG, [*staleness.overrides(13), f"run.directory={tmp_path}"])
    check_config(config)
    assert (config.staleness_limit, config.trainer.loss.name, config.trainer.loss.decoupled) == (0, "grpo", True)
    assert (config.trainer.minibatches, config.trainer.optimizer.learning_rate) == (2, 3e-4)
    assert config.trainer.checkpoint.keep >= config.trainer.updates
    staleness.check_run(config)


def test_moments_are_those_of_the_gradients() -> None:
    gradients = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    mean, trace = mean_and_covariance_trace(iter(gradients))
    assert torch.allclose(mean.float(), gradients.mean(0))
    assert trace == pytest.approx(float(gradients.var(0).sum()), rel=1e-5)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"logprob_mismatch": 0.2}, "differ by 0.2"),
        ({"logprob_mismatch": None}, "differ by None"),
        ({"difference": 0.1}, "gradients differ"),
        ({"difference": float("nan")}, "gradients differ"),
        ({"coupled": replace(ARM, clipped=0.02)}, "1.00% and 2.00% of tokens"),
    ],
)
def test_arms_that_differ_without_staleness_are_refused(changed: dict[str, Any], words: str) -> None:
    staleness.check_fresh(FRESH)
    with pytest.raises(RuntimeError, match=words):
        staleness.check_fresh(replace(FRESH, **changed))


def test_an_update_that_is_not_the_jobs_is_refused() -> None:
    update = {"clip_fraction": 0.01, "extra": {"gradient_norm": 2.001}}
    staleness.check_repeated(FRESH, update, True)
    with pytest.raises(RuntimeError, match="differs from the job's"):
        staleness.check_repeated(FRESH, update | {"extra": {"gradient_norm": 2.1}}, True)
    with pytest.raises(RuntimeError, match="has no update from version 2"):
        staleness.check_repeated(FRESH, None, True)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.mode=async", "use sync"),
        ("trainer.loss.name=raft", "trains successes only"),
        ("trainer.loss.kl_coefficient=0.1", "without reference"),
        ("trainer.data_parallel=2", "trained by 2 ranks"),
    ],
)
def test_a_run_that_cannot_be_repeated_is_refused(override: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        staleness.check_run(parse_config(None, ["rollout.mode=sync", override]))


def test_groups_of_mixed_versions_and_missing_versions_are_refused(tmp_path: Path) -> None:
    config = parse_config(None, [f"run.directory={tmp_path}"])
    with pytest.raises(RuntimeError, match=r"groups of 3 versions in records/ \(there: 0\)"):
        staleness.complete_versions(config.run_folder, config, 2)
    replay_buffer.write_trajectories(
        replay_buffer.group_file_path(config.records_folder, 3), [trajectory(version=3), trajectory(1, version=2)]
    )
    with pytest.raises(RuntimeError, match=r"tokens of versions \[2, 3\], not of 3 alone"):
        staleness.check_records(config, 3)


def test_the_goal_needs_half_of_something() -> None:
    stale = replace(FRESH, staleness=2)
    for without, with_it, verdict in ((0.4, 0.2, "met"), (0.4, 0.21, "missed"), (0.0, 0.0, "missed"), (0.1, 0, "met")):
        pair = replace(stale, decoupled=replace(ARM, clipped=with_it), coupled=replace(ARM, clipped=without))
        assert f"halved at 2: {verdict}" in staleness._verdict([pair], "clip-trigger rate")


def test_figures_are_means_over_versions_with_their_range(capsys: pytest.CaptureFixture[str]) -> None:
    pairs = [
        replace(FRESH, version=v, staleness=s, coupled=replace(ARM, clipped=0.1 * v, trace=12.0))
        for v in (2, 3)
        for s in (0, 1, 2)
    ]
    staleness.show(pairs, staleness.Console(width=80))
    printed = capsys.readouterr().out
    assert "25.00% (20.0 to 30.0)" in printed
    assert max(map(len, printed.split("clip-trigger")[0].splitlines())) <= 80
    assert "clip-trigger rate at staleness 2, without / with: 25.00 (goal: halved at 2: met)" in printed
    assert "gradient variance at staleness 2, without / with: 2.00 (goal: halved at 2: met)" in printed
    texts = xml.etree.ElementTree.fromstring(staleness.draw(pairs)).iter("{http://www.w3.org/2000/svg}text")
    assert {"Clip-trigger rate", "Gradient variance", "without decoupling"} <= {text.text for text in texts}


def test_a_run_in_which_nothing_is_clipped_is_drawn() -> None:
    still = replace(ARM, clipped=0.0)
    drawn = staleness.draw([replace(FRESH, decoupled=still, coupled=still)])
    assert "nan" not in drawn


def test_a_run_is_not_given_settings_of_a_job() -> None:
    with pytest.raises(SystemExit):
        staleness.main(["--run", "somewhere", "--updates", "5"])
    with pytest.raises(SystemExit, match=r"bench.staleness: .*absent"):
        staleness.main(["--run", "absent"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of three updates, and what its process found."""
    folder = tmp_path_factory.mktemp("staleness")
    spawn(staleness_ranks.run, str(folder), str(tiny_model), ranks=1)
    return folder


def test_the_mean_of_the_groups_gradients_is_that_of_the_batch(folder: Path) -> None:
    found = torch.load(folder / "found.pt", weights_only=False)
    assert set(found) == {"constant", "token_mean"}
    for each in found.values():
        assert float((each["whole"] - each["mean"]).norm() / each["whole"].norm()) < 1e-4
        assert each["trace"] > 0


@pytest.mark.slow
def test_a_run_is_measured_offline(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # of the process that computes
    moved = Path(shutil.copytree(folder / "run", tmp_path / "elsewhere"))
    staleness.main(["--run", str(moved), "--quick", "--json", str(tmp_path / "new.json"),
                    "--plots", str(tmp_path / "plot.svg")])  # fmt: skip
    assert "goal: halved at 2" in capsys.readouterr().out
    found = json.loads((tmp_path / "new.json").read_text())
    fresh, near, far = found["pairs"]
    assert [pair["staleness"] for pair in found["pairs"]] == [0, 1, 2]
    assert fresh["logprob_mismatch"] < 1e-4
    assert near["logprob_mismatch"] is None
    # The further the policy that made the groups, the more of its tokens are out of bounds without decoupling.
    assert fresh["difference"] < staleness.GRADIENT_TOLERANCE < near["difference"] < far["difference"]
    assert fresh["coupled"]["clipped"] < near["coupled"]["clipped"] < far["coupled"]["clipped"]
    assert far["decoupled"]["clipped"] < far["coupled"]["clipped"]
    assert len(found["means"]) == 3
    xml.etree.ElementTree.parse(tmp_path / "plot.svg")
