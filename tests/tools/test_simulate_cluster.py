"""Runs as their files tell of them, simulated and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.placement.simulation import ProcessorSharingServer, SimulatedClock, linear_slowdown
from megatron_webrl.track.episodes import EpisodeLog, read_lines
from tests.tools.written_runs import Timed, update, write_episode, write_run
from tools import simulate_cluster
from tools.cluster import comparison, timeline


def a_synchronous_run(folder: Path) -> Path:
    """Five updates, 25 s apart: 16 s of episodes, 8 s of training, 1 s of sync."""
    folder.mkdir(exist_ok=True)
    log, updates = EpisodeLog(folder, 0), []
    for version in range(5):
        begin = 1000.0 + version * 25
        for number in range(4):
            timed = Timed((2.0,) * 3, (3.0,) * 3, begin + 16, 16.0)
            write_episode(log, 2 * version + number // 2, number % 2, timed, version, reward=float(number % 2))
        updates.append(update(version + 1, begin + 25, wait=15.5, train=8.0, sync=1.0, pause=0.5))
    log.close()
    write_run(folder, updates)
    return folder


def test_a_run_is_simulated_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_synchronous_run(tmp_path / "even")
    assert simulate_cluster.main([str(run), "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    assert "even: sync, free" in shown
    assert "all agree" in shown
    rows = {row.name: row for row in comparison.compare_with_simulation(comparison.read_run(run), 2, 0.15)}
    assert rows["per_hour"].measured == pytest.approx(4 * 3600 / 25)
    assert rows["updates_per_hour"].measured == pytest.approx(3600 / 25)
    assert rows["waiting"].measured == pytest.approx(15.5 / 25)
    assert (rows["staleness"].measured, rows["staleness"].ratio) == (0, None)
    for name in ("per_hour", "updates_per_hour", "waiting"):
        assert rows[name].ratio == pytest.approx(1)


def test_groups_keep_their_fates(tmp_path: Path) -> None:
    run = a_synchronous_run(tmp_path / "fates")
    log = EpisodeLog(run, 20)
    timed = Timed((2.0,), (3.0,), 1010.0, 6.0)
    for ticket, (rewards, reason) in enumerate(
        [((0.0, 0.0), "all_failed"), ((1.0, 1.0), "stale"), ((0.0, 1.0), "stale"), ((0.0, 0.0), "aborted")], 20
    ):
        for index, reward in enumerate(rewards):
            write_episode(log, ticket, index, timed, 2, reward=reward, reason=reason)
    log.close()
    found = comparison.read_run(run)
    faults = [group.drop_reason for group in found.workload.groups]
    assert faults == [None] * 10 + ["all_failed", "zero_variance", None, None]
    assert found.workload.groups[10].episodes[0].reset == pytest.approx(1.0)
    assert found.figures == comparison.read_run(a_synchronous_run(tmp_path / "same")).figures
    assert [(c.sync, c.pause, c.other) for c in found.cycles] == [pytest.approx((1.0, 0.5, 0.5))] * 4
    assert [c.seconds_per_token for c in found.cycles] == pytest.approx([8 / (4 * 3 * (5 + 3))] * 4)


def requests_of_an_engine(serial: float, training: list[timeline.TimeSpan]) -> list[Timed]:
    """Episodes that an engine served, with a token a second for a lone request, half as fast beside training."""
    clock, rng = SimulatedClock(), np.random.default_rng(0)
    engine = ProcessorSharingServer(clock, linear_slowdown(serial))
    found: list[Timed] = []
    for begin, end in training:
        clock.call_at(begin, lambda: engine.set_speed(0.5))
        clock.call_at(end, lambda: engine.set_speed(1.0))

    def episode(start: float) -> None:
        generations: list[float] = []
        browsers = rng.uniform(1, 20, 6).tolist()

        def ask() -> None:
            begun = clock.now
            engine.submit(4.0 if len(generations) % 2 else 8.0, lambda: answered(begun))

        def answered(begun: float) -> None:
            generations.append(clock.now - begun)
            pause = browsers[len(generations) - 1]
            if len(generations) < len(browsers):
                clock.call_later(pause, ask)
            else:
                ended = clock.now + pause
                found.append(Timed(tuple(generations), tuple(browsers), ended, ended - start))

        clock.call_at(start + 1.0, ask)

    for number in range(24):
        episode(float(4 * number))
    clock.run_until(lambda: len(found) == 24)
    return found


@pytest.mark.parametrize("serial", [0.0, 0.3])
def test_contention_is_read_from_the_times_of_requests(tmp_path: Path, serial: float) -> None:
    training = [(20.0, 50.0), (90.0, 120.0)]
    log = EpisodeLog(tmp_path, 0)
    for ticket, timed in enumerate(requests_of_an_engine(serial, training)):
        write_episode(log, ticket, 0, timed, 0, responses=(8, 4) * 3)
    log.close()
    lines = read_lines(tmp_path)
    placed = timeline.reconstruct_timelines(lines, "free")
    assert [one.reset for one in placed] == pytest.approx([1.0] * 24, abs=0.01)
    found = timeline.fit_engine(placed, training, [])
    assert (found.serial, found.overlap) == (serial, pytest.approx(0.5))
    assert found.request_work == pytest.approx(np.tile([8.0, 4.0], 72), rel=0.02)


def test_rounds_are_read_from_a_run_in_step(tmp_path: Path) -> None:
    # The later reset of 4, rounds of 2 and 2; actions of 2 and of 3 or 1: see the simulation of the same two.
    run = tmp_path / "step"
    run.mkdir()
    log = EpisodeLog(run, 0)
    for version in range(3):
        at = 100.0 + 15 * version
        write_episode(log, version, 0, Timed((1.0, 2.0), (1.0, 3.0), at + 13, 13.0), version, reward=1.0)
        write_episode(log, version, 1, Timed((2.0, 1.0), (2.0, 1.0), at + 11, 11.0), version)
    log.close()
    updates = [update(n + 1, 115.0 + 15 * n, wait=13.0, train=1.0, sync=1.0, pause=1.0) for n in range(3)]
    write_run(run, updates, {"rollout": {"stepping": "lockstep"}, "trainer": {"groups_per_update": 1}})
    for one in timeline.reconstruct_timelines(read_lines(run), "lockstep"):
        begun = one.line["finished_at"] - one.line["seconds"]
        assert one.reset == pytest.approx(4.0)
        assert np.subtract(one.request_starts, begun) == pytest.approx([4.0, 8.0])
    rows = comparison.compare_with_simulation(comparison.read_run(run), 1, 0.15)
    assert all(row.agrees for row in rows)


def test_runs_that_cannot_be_simulated_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed: list[tuple[dict[str, Any], int, str]] = [
        ({"run": {"resume": True}}, 3, "was resumed (run.resume)"),
        ({"evaluation": {"every": 2}}, 3, "evaluated during training (evaluation.every=2)"),
        ({}, 1, "has 1 updates; the first 1 are not counted: run at least 2"),
        ({}, 3, "has no trained episodes in episodes.jsonl"),
    ]
    for number, (config, count, message) in enumerate(changed):
        lines = [update(n + 1, 100.0 + n, wait=0.1, train=0.1, sync=0.1, pause=0.1) for n in range(count)]
        write_run(tmp_path / str(number), lines, config)
        assert simulate_cluster.main([str(tmp_path / str(number))]) == 2
        [error] = capsys.readouterr().err.splitlines()
        assert error.startswith("simulate_cluster: ")
        assert message in error
    assert simulate_cluster.main([str(tmp_path / "missing")]) == 2
