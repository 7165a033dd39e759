"""Time to success by mode: histories and comparisons made by hand, a run made by hand, and, at length, the jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.launch.validation import load_config
from megatron_webrl.track import summary
from tests.monitor import made_timelines
from tools.bench.modes import __main__ as command
from tools.bench.modes.comparison import Figure, ratio, spread
from tools.bench.modes.history import (
    RunHistory,
    UpdateRecord,
    smoothed_success,
    time_shares,
    time_to_success,
    update_records,
    wasted_shares,
    wasted_with_signal,
)
from tools.bench.modes.runs import MODES, QUICK, Bench, Target, measure, read_run
from tools.bench.modes.table import mode_figures

TARGET = Target(success=0.65, window=2, updates=4)
RISING = (0.4, 0.5, 0.7, 0.8)  # means of two: 0.45, 0.6, 0.75


def record(number: int, success: float | None, episodes: int = 10, seconds: float = 60.0) -> UpdateRecord:
    return UpdateRecord(number, seconds * number, success, episodes if success is not None else 0, 8, 1.0)


def records(rates: Sequence[float | None], seconds: float = 60.0) -> tuple[UpdateRecord, ...]:
    return tuple(record(number, rate, seconds=seconds) for number, rate in enumerate(rates, 1))


def history(mode: str, seed: int, rates: Sequence[float | None] = RISING, seconds: float = 60.0) -> RunHistory:
    return RunHistory(mode, seed, records(rates, seconds), 900, {"stale": 20, "all_failed": 80})


def line(version: int, at: float, rate: float, masked: float = 0.0) -> dict[str, object]:
    """A line of updates.jsonl of one group of two trajectories."""
    seconds = {"rollout": 4.0, "train": 3.0, "sync": 1.0, "wait": 6.0}
    extra = {"rollout_success_rate": rate, "rollout_episodes": 8.0, "masked_episodes": masked}
    return {"version": version, "groups": 1, "seconds": seconds, "finished_at": at, "staleness_mean": 0.5,
            "extra": extra}  # fmt: skip


# Smoothing and time to success


def test_an_update_counts_by_its_sampled_episodes():
    updates = [record(1, 0.0, episodes=30), record(2, 1.0, episodes=10), record(3, 0.5, episodes=10)]
    assert smoothed_success(updates, 1) == [0.0, 1.0, 0.5]
    assert smoothed_success(updates, 2) == [None, 0.25, 0.75]
    assert smoothed_success(updates, 4) == [None, None, None]


def test_an_update_without_a_complete_group_adds_no_episode():
    updates = records([0.5, None, 0.7])
    assert smoothed_success(updates, 1) == [0.5, None, 0.7]
    assert smoothed_success(updates, 2) == [None, 0.5, 0.7]
    assert time_to_success(updates, 0.7, 1).updates == 3


def test_smoothing_is_the_share_of_successes_among_all_episodes_of_the_window():
    rng = np.random.default_rng(0)
    episodes = [rng.random(rng.integers(1, 50)) < 0.5 for _ in range(30)]
    updates = [record(n, float(np.mean(each)), len(each)) for n, each in enumerate(episodes, 1)]
    smoothed = smoothed_success(updates, 7)
    assert smoothed[:6] == [None] * 6
    for number in range(7, 31):
        assert smoothed[number - 1] == pytest.approx(np.concatenate(episodes[number - 7 : number]).mean())


def test_the_first_update_that_reaches_the_success_ends_the_count():
    end = time_to_success(records([*RISING, 0.1, 0.9]), 0.65, 2)
    assert end.reached
    assert (end.updates, end.seconds, end.trajectories, end.episodes) == (4, 240.0, 32, 40)
    assert end.per_hour == pytest.approx(3600 * 32 / 240)


def test_one_good_update_is_not_enough_before_the_window_is_full():
    assert time_to_success(records([0.9, 0.5, 0.6, 0.8]), 0.65, 2).updates == 2  # 0.7 over both
    assert time_to_success(records([0.9, 0.2, 0.6, 0.8]), 0.65, 2).updates == 4


def test_a_run_that_does_not_reach_it_is_censored_at_its_end():
    end = time_to_success(records([0.1, 0.2, 0.3]), 0.65, 2)
    assert not end.reached
    assert (end.updates, end.seconds, end.trajectories) == (3, 180.0, 24)


def test_the_clock_starts_with_the_first_update_and_masked_episodes_are_not_trained():
    found = update_records([line(1, 1010.0, 0.5), line(2, 1025.0, 0.75, masked=1.0)], group_size=2)
    assert [each.ended for each in found] == [10.0, 25.0]
    assert [each.trained for each in found] == [2, 1]
    assert [(each.success, each.episodes) for each in found] == [(0.5, 8), (0.75, 8)]
    assert update_records([], 2) == ()


# Waste and shares


def test_wasted_tokens_are_shares_of_all_by_reason():
    shares = wasted_shares(700, {"stale": 100, "all_failed": 150, "retried": 50})
    assert shares == {"all_failed": 0.15, "stale": 0.1, "retried": 0.05}
    assert list(shares) == ["all_failed", "stale", "retried"]
    assert wasted_with_signal(shares) == pytest.approx(0.15)
    assert wasted_shares(0, {}) == {}


def test_shares_of_time_weigh_updates_by_their_seconds():
    first = replace(record(1, 0.5), parts={"train": 2.0, "wait for groups": 8.0}, engine_idle=0.1,
                    path={"pack": 2.0, "wait: engine": 8.0})  # fmt: skip
    second = replace(record(2, 0.5), parts={"train": 24.0, "weight exchange": 3.0, "other": 3.0}, engine_idle=0.9,
                     path={"forward and backward": 24.0, "pack": 3.0, "other": 3.0})  # fmt: skip
    found = time_shares([first, second, record(3, 0.5)])  # the timeline lacks the third
    assert found is not None
    assert (found.training, found.waiting, found.exchanging) == (26 / 40, 8 / 40, 3 / 40)
    assert found.other == pytest.approx(3 / 40)
    assert found.engine_idle == pytest.approx((0.1 * 10 + 0.9 * 30) / 40)
    assert list(found.path)[:2] == ["forward and backward", "wait: engine"]
    assert sum(found.path.values()) == pytest.approx(1)
    assert time_shares([record(1, 0.5)]) is None


# Comparison over seeds


def test_a_censored_value_stays_in_mean_and_range():
    found = spread([Figure(100.0), Figure(300.0, censored=True), Figure(200.0)])
    assert found.mean == Figure(200.0, censored=True)
    assert (found.low, found.high) == (Figure(100.0), Figure(300.0, censored=True))
    assert spread([Figure(100.0, censored=True), Figure(200.0)]).low == Figure(100.0, censored=True)
    assert spread([Figure(1.0), Figure(3.0)]).mean == Figure(2.0)


def test_a_ratio_is_of_means_and_with_three_seeds_its_interval_is_the_range_of_the_pairs():
    ours, theirs = {0: 100.0, 1: 200.0, 2: 150.0, 7: 1.0}, {0: 200.0, 1: 250.0, 2: 500.0}
    found = ratio({n: Figure(v) for n, v in ours.items()}, {n: Figure(v) for n, v in theirs.items()})
    assert found is not None
    assert (found.value, found.seeds, found.bound) == (pytest.approx(450 / 950), 3, "exact")
    # each seed is drawn three times with probability 1/27, more than the 2.5 % that an end of the interval leaves out
    assert found.interval == pytest.approx((150 / 500, 200 / 250))


def test_the_interval_is_that_of_all_resamples():
    rng = np.random.default_rng(1)
    values = rng.uniform(50, 150, (5, 2))
    found = ratio(*({n: Figure(float(v)) for n, v in enumerate(column)} for column in values.T))
    drawn = np.stack(np.meshgrid(*[range(5)] * 5), -1).reshape(-1, 5)
    sums = values[drawn].sum(axis=1)
    ratios = sums[:, 0] / sums[:, 1]
    assert found is not None
    assert found.interval is not None
    for end, share in zip(found.interval, (0.025, 0.975), strict=True):
        assert np.mean(ratios < end) == pytest.approx(share, abs=0.006)


def test_a_ratio_with_a_censored_run_is_a_bound():
    exact, late = {0: Figure(100.0), 1: Figure(100.0)}, {0: Figure(200.0), 1: Figure(400.0, censored=True)}
    below, above = ratio(exact, late), ratio(late, exact)
    assert below is not None
    assert above is not None
    assert (below.bound, below.value) == ("at_most", pytest.approx(1 / 3))
    assert (above.bound, above.value) == ("at_least", pytest.approx(3))
    assert ratio(late, late) is None


def test_one_seed_gives_no_interval_and_no_common_seed_no_ratio():
    found = ratio({0: Figure(1.0)}, {0: Figure(2.0)})
    assert found is not None
    assert found.interval is None
    assert ratio({0: Figure(1.0)}, {1: Figure(2.0)}) is None


def test_modes_are_compared_over_the_seeds_of_both():
    runs = [history("async", seed) for seed in range(3)] + [
        history("sync, lockstep", 0, seconds=180.0),
        history("sync, lockstep", 1, rates=(0.1, 0.2, 0.3, 0.4), seconds=180.0),
    ]
    ours, peer = mode_figures(runs, TARGET)
    assert ours.time_ratio is not None
    assert ours.time_ratio.value == 1
    assert peer.time_ratio is not None
    assert peer.rate_ratio is not None
    assert (peer.time_ratio.bound, peer.time_ratio.value) == ("at_most", pytest.approx(1 / 3))
    assert (peer.rate_ratio.bound, peer.rate_ratio.value) == ("exact", pytest.approx(3))
    assert peer.to_json()["reached"] == 1
    assert peer.to_json()["seconds"]["mean"] == {"value": 720.0, "censored": True}


# Runs


def write_run(folder: Path, *, matches: bool = True) -> Path:
    """The run of made_timelines with its updates.jsonl and summary.json."""
    run = made_timelines.write_run(folder).run_folder
    summary.open_updates(run).append(line(1, made_timelines.UNIX + 10, 0.25), line(2, made_timelines.UNIX + 35, 0.75))
    tokens = {"trained": 60, "dropped": {"stale": 40}}
    accounting = {"matches": matches, "tokens": tokens}
    (run / "summary.json").write_text(json.dumps({"accounting": accounting}))
    return run


def test_a_run_is_read_with_its_timeline(tmp_path: Path):
    found = read_run("async", 3, write_run(tmp_path))
    assert (found.mode, found.seed, found.tokens_trained, found.tokens_dropped) == ("async", 3, 60, {"stale": 40})
    assert [each.ended for each in found.updates] == pytest.approx([10.0, 35.0])
    shares = time_shares(found.updates)
    assert shares is not None
    assert (shares.waiting, shares.training) == (pytest.approx(15 / 35), pytest.approx(8 / 35))
    assert (shares.exchanging, shares.other) == (pytest.approx(2 / 35), pytest.approx(10 / 35))
    assert shares.engine_idle == pytest.approx(1 - 8 / 25 - 1 / 25)  # of update 2; a request for 8 s, a pause of 1 s
    assert shares.path["wait: engine"] == pytest.approx(7 / 35)
    assert RunHistory.from_json(json.loads(json.dumps(asdict(found)))) == found


def test_a_run_without_matching_accounting_or_timeline_gives_no_figures(tmp_path: Path):
    with pytest.raises(RuntimeError, match="does not match"):
        read_run("async", 0, write_run(tmp_path / "a", matches=False))
    run = write_run(tmp_path / "b")
    for path in (run / "timeline").iterdir():
        path.unlink()
    with pytest.raises(RuntimeError, match="has no timeline"):
        read_run("async", 0, run)


@pytest.mark.parametrize("mode", MODES)
def test_all_jobs_are_valid(mode: str, tmp_path: Path):
    limits = {"async": 2, "one step off": 1, "sync, free-running": 0, "sync, lockstep": 0}
    for overrides in ((), QUICK):
        settings = a_bench(tmp_path, overrides).settings(mode, 1)
        config = load_config("configs/quickstart.yaml", [*settings, f"run.directory={tmp_path}"])
        assert (config.staleness_limit, config.run.seed, config.trainer.updates) == (limits[mode], 1, 4)


def a_bench(folder: Path, overrides: tuple[str, ...] = (), target: Target = TARGET) -> Bench:
    return Bench(folder, target, overrides, lambda text: None, lambda text: None)


def store(bench: Bench, found: RunHistory) -> None:
    bench.store(found)
    assert bench.stored(found.mode, found.seed) == found


def test_a_finished_run_is_not_repeated(tmp_path: Path):
    bench, said = a_bench(tmp_path), list[str]()
    runs = [history(mode, seed) for seed in (0, 1) for mode in ("async", "sync, lockstep")]
    for each in runs:
        store(bench, each)
    assert measure(replace(bench, report=said.append), ("async", "sync, lockstep"), (0, 1)) == runs
    assert said[0] == "1 of 4: async, seed 0, stored: 65% after 4 updates, 240 s"


def test_a_run_that_was_stopped_at_a_lower_success_is_repeated(tmp_path: Path):
    stopped = history("async", 0, rates=(0.4, 0.9))
    store(a_bench(tmp_path), stopped)
    assert a_bench(tmp_path, target=replace(TARGET, success=0.8)).stored("async", 0) is None
    assert a_bench(tmp_path).stored("async", 1) is None


def test_a_run_with_other_settings_is_refused(tmp_path: Path):
    store(a_bench(tmp_path), history("async", 0))
    for other in (a_bench(tmp_path, ("trainer.epochs=2",)), a_bench(tmp_path, target=replace(TARGET, updates=5))):
        with pytest.raises(RuntimeError, match=r"async-0.json is of a run with other settings"):
            other.stored("async", 0)


def test_the_table_holds_every_run_also_a_censored_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    bench = a_bench(tmp_path, target=Target(0.65, 2, 4))
    for seed in (0, 1):
        for mode in MODES:
            rates = (0.1, 0.2, 0.3, 0.4) if (mode, seed) == ("sync, lockstep", 1) else RISING
            store(bench, history(mode, seed, rates, seconds=60.0 if mode == "async" else 120.0))
    path = tmp_path / "figures.json"
    words = ["--folder", str(tmp_path), "--seeds", "0", "1", "--window", "2", "--updates", "4",
             "--success", "0.65", "--json", str(path)]  # fmt: skip
    assert command.main(words) == 0
    shown = capsys.readouterr().out
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for text in shown.splitlines()
            if len(cells := text.replace("│", "┃").split("┃")) == 7}  # fmt: skip
    assert rows["runs that reached it"] == ["2 of 2", "2 of 2", "2 of 2", "1 of 2"]
    assert rows["minutes"] == ["4.0", "8.0", "8.0", "≥ 8.0 (8.0 to ≥ 8.0)"]
    assert rows["wasted tokens"] == ["10.0%"] * 4
    assert rows["except one-outcome groups"] == ["2.0%"] * 4
    assert rows["engines idle"] == ["-"] * 4
    figures = json.loads(path.read_text())
    assert len(figures["runs"]) == 8
    assert [mode["reached"] for mode in figures["modes"]] == [2, 2, 2, 1]
    assert figures["modes"][3]["time_ratio"]["bound"] == "at_most"


@pytest.mark.parametrize("words", [["--success", "1.5"], ["--window", "9", "--updates", "4"]])
def test_a_success_that_no_run_can_reach_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command.main(words)
    assert words[0] in capsys.readouterr().err


@pytest.mark.soak
def test_the_jobs_run(tmp_path: Path):
    words = [sys.executable, "-m", "tools.bench.modes", "--quick", "--folder", str(tmp_path)]
    subprocess.run([*words, "--json", str(tmp_path / "figures.json")], check=True, timeout=2400)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [mode["mode"] for mode in figures["modes"]] == list(MODES)
    for run in figures["runs"]:
        assert len(run["updates"]) <= 2
        assert all(update["parts"] and update["trained"] for update in run["updates"])
    assert subprocess.run(words, check=True, timeout=60, capture_output=True).stdout.count(b"stored") == 4
