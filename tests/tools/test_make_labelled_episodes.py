"""Labelled episodes: recorded in Chromium, and judged right with the oracle behind a real endpoint."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.types import ANSWER, STEPS_EXHAUSTED, Trajectory
from tests.judge.support import judging
from tools import make_labelled_episodes
from tools.make_webgym_tasks import main as make_tasks
from tools.offline.scripted_episodes import SHARES, near_answer, plan_episodes
from tools.offline.site_truth import SiteTruth, read_bar_code
from tools.offline.task_rows import read_tasks, read_truth

EPISODES = 16


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    assert make_tasks([str(folder), "--tasks", "120", "--test", "20"]) == 0
    return folder


def test_plans_have_all_kinds_of_episodes_and_are_reproducible(tasks: Path) -> None:
    found = read_tasks(tasks)
    plans = plan_episodes(found, 300, 0)
    counts = Counter(plan.kind for plan in plans)
    assert counts == {kind: round(300 * share) for kind, share in SHARES.items()}
    assert [plan.ticket for plan in plans] == list(range(300))
    assert plan_episodes(found, 300, 0) == plans != plan_episodes(found, 300, 1)
    assert len({plan.task_id for plan in plans if plan.kind == "success"}) >= 90
    with pytest.raises(ValueError, match="none of the 0 tasks permits an episode of the kind"):
        plan_episodes({}, 3, 0)


def test_a_near_answer_is_wrong_and_of_the_same_form(tasks: Path) -> None:
    for _, goal in read_tasks(tasks).values():
        near, right = near_answer(goal), goal.answer
        assert (near == right) == bool(goal.goal.effects)
        for form in (str.isdigit, lambda text: text in ("yes", "no"), lambda text: text[:1] == "$"):
            assert form(near) == form(right)


def trajectories(file: Path) -> list[Trajectory]:
    return [decode_trajectory(record) for record in read_record_file(file)]


async def judged(tasks: Path, episodes: list[Trajectory]) -> list[str]:
    async with judging(SiteTruth(read_truth(tasks))) as (evaluator, _):
        return [(await evaluator.evaluate(episode)).outcome for episode in episodes]


def test_recorded_episodes_are_judged_as_labelled(tasks: Path, tmp_path: Path) -> None:
    records, labels = tmp_path / "judged.records", tmp_path / "judged.jsonl"
    arguments = ["--tasks", str(tasks), "--out", str(records), "--labels", str(labels), "--episodes", str(EPISODES)]
    assert make_labelled_episodes.main(arguments) == 0
    rows = [json.loads(line) for line in labels.read_text().splitlines()]
    episodes = trajectories(records)
    assert [(row["ticket"], row["index"]) for row in rows] == [(each.ticket, each.index) for each in episodes]
    assert {row["kind"] for row in rows} == set(SHARES)
    for row, episode in zip(rows, episodes, strict=True):
        assert episode.task.id == row["task_id"]
        assert len(episode.images) == len(episode.steps) + 1
        assert episode.end_reason == (STEPS_EXHAUSTED if episode.answer is None else ANSWER)
        assert (episode.answer is None) >= (row["kind"] == "no_answer")
        assert all(step.url.startswith(f"http://{episode.task.website}/") for step in episode.steps)
        codes = [read_bar_code(bytes(image)) for image in episode.images]
        assert None not in codes
        assert any(code.denied for code in codes if code) == (row["label"] == "blocked")
    verdicts = asyncio.run(judged(tasks, episodes))
    assert [(row["ticket"], row["label"]) for row in rows] == list(zip(range(EPISODES), verdicts, strict=True))
