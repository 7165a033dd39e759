"""Runs as their files tell of them, simulated and compared; clusters predicted, and the page that shows them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.hardware import CARDS
from megatron_webrl.track.episodes import EpisodeLog, read_lines
from tests.tools.written_runs import Timed, update, write_episode, write_run
from tools import simulate_cluster
from tools.cluster import comparison, prediction, timeline
from tools.cluster.simulation import ProcessorSharingServer, SimulatedClock, engine_rate

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


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
    assert simulate_cluster.main(["check", str(run), "--seeds", "2"]) == 0
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
    engine = ProcessorSharingServer(clock, engine_rate(serial))
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
        assert simulate_cluster.main(["check", str(tmp_path / str(number))]) == 2
        [error] = capsys.readouterr().err.splitlines()
        assert error.startswith("simulate_cluster: ")
        assert message in error
    assert simulate_cluster.main(["check", str(tmp_path / "missing")]) == 2


# -- predictions -----------------------------------------------------------------------------------

TINY = ("gpus=3", "batch=8", "agents=16")


def test_the_work_is_as_the_inputs_say() -> None:
    given = prediction.SimulationInputs()
    drawn = [prediction.RandomWorkload(given).draw(seed, np.random.default_rng(seed)) for seed in range(500)]
    episodes = [episode for group in drawn for episode in group.episodes]
    steps = [step for episode in episodes for step in episode.steps]
    assert np.mean([step.response for step in steps]) == pytest.approx(given.response, rel=0.03)
    assert np.median([step.browser for step in steps]) == pytest.approx(given.browser_seconds, rel=0.06)
    assert max(step.browser for step in steps) <= given.browser_limit
    lengths = np.array([len(episode.steps) for episode in episodes])
    # Failures of 12.5 steps; a geometric length of 5.1 cut off at 10 has a mean of 4.5.
    assert lengths.mean() == pytest.approx(0.546 * 12.5 + 0.454 * 4.5, rel=0.06)
    assert {group.drop_reason for group in drawn} == {None, "all_succeeded", "all_failed"}
    kept = prediction.RandomWorkload(replace(given, drop_zero_variance=0))
    assert {kept.draw(seed, np.random.default_rng(seed)).drop_reason for seed in range(50)} == {None}


def test_the_speed_of_a_simulation_comes_from_the_cost_model() -> None:
    published, path = prediction.SimulationInputs(), str(PAGE.parents[1] / "configs" / "8b_1node.yaml")
    found = prediction.from_cost_model(published, parse_config(path, []), CARDS["H100"])
    for name in ("token_seconds", "prefill_tokens_per_second", "train_tokens_per_second", "weights_gb"):
        assert getattr(found, name) == pytest.approx(getattr(published, name), rel=0.25), name
    assert found.token_seconds_per_request > 0
    with pytest.raises(ValueError, match="tensor_parallel x pipeline_parallel = 2"):
        prediction.from_cost_model(published, parse_config(path, ["rollout.tensor_parallel=2"]), CARDS["H100"])


def test_the_command_predicts_and_writes_between_the_marks_of_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    before, after = f"before\n\n{prediction.BEGIN_MARKER}\n", f"{prediction.END_MARKER}\n\nafter\n"
    page.write_text(f"{before}old\n{after}")
    words = ["predict", "--quick", "--nodes", "1", "--set", *TINY, "browser_seconds=2", "--write", str(page)]
    assert simulate_cluster.main(words) == 0
    shown, text = capsys.readouterr().out, page.read_text()
    assert "not measured" in shown
    assert text.startswith(f"{before}\nRecommended: 1 nodes: ")
    assert text.endswith(f"\n\n{after}")
    assert "old" not in text
    assert "| 2:1 |" in text.replace("**", "")
    assert "| `browser_seconds` | 2 |" in text
    assert text.removeprefix(before).removesuffix(after).strip() in shown


def test_inputs_out_of_range_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, message in (
        ("--set", "browsers=1", "'browsers' is no input"),
        ("--set", "browser_seconds=fast", "'browser_seconds=fast' is not name=value with a number"),
        ("--set", "gpus=2.5", "gpus=2.5 is no int of at least 2"),
        ("--set", "browser_seconds=nan", "browser_seconds=nan is no float"),
        ("--set", "batch=12", "batch=12 is no multiple of group_size=8"),
        ("--set", "success=1", "success=1 is not between 0 and 1"),
        ("--set", "hard_share=0.9", "medium_share=0.15 and hard_share=0.9 are more than all tasks"),
        ("--write", "missing.md", "missing.md"),
    ):
        assert simulate_cluster.main(["predict", "--quick", option, value]) == 2
        [error] = capsys.readouterr().err.splitlines()
        assert error.startswith("simulate_cluster: ")
        assert message in error


def test_the_page_shows_what_the_inputs_give() -> None:
    text, given = PAGE.read_text(), prediction.SimulationInputs()
    rows = ["| " + " | ".join(row) + " |" for row in prediction.input_rows(given)]
    assert "\n".join(rows) in text, "write docs/scaling.md again: python -m tools.simulate_cluster predict --write ..."
    # One of the simulations of the page, the quickest.
    found = prediction.predict_cluster(given, prediction.colocated_split(8, 8), "sync", "lockstep", prediction.FULL)
    _, where, rate, *_ = prediction.mode_row(found, found)
    assert f"| `sync`, lockstep | {where} | {rate} |" in text
