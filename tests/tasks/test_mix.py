"""Several sources in one run: shares of tickets, tasks, evaluations, verdicts, and what is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl import cli
from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import LatencyConfig, TasksConfig, tasks_config
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.launch.evaluation import EvaluatedCheckpoint, parse_evaluation_config
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.tasks.files.table import difference_from_checkpoint, task_file_digests
from megatron_webrl.tasks.mix import TaskMix, referenced_task, share_tickets
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.types import TaskReference
from tests.documented_blocks import blocks_run_by
from tests.tasks.files.webgym_rows import webgym_row, write_rows
from tests.trajectories import trajectory

ROWS = 6


@pytest.fixture
def tasks(tmp_path: Path) -> TasksConfig:
    training = write_rows(tmp_path / "train.jsonl", [webgym_row(number) for number in range(ROWS)])
    test = write_rows(tmp_path / "test.jsonl", [webgym_row(number) for number in range(20, 24)])
    return tasks_config("mix", max_steps=7, latency=LatencyConfig(2.0), mix=[
        {"source": "miniwob", "environments": ["click-test", "click-tab"], "weight": 3},
        {"source": "sites", "environments": ["forms-vote"], "max_steps": 4},
        {"source": "webgym", "name": "web", "train_file": str(training), "test_file": str(test),
         "evaluators": ["judge"]},
    ])  # fmt: skip


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5), st.integers(0, 2**40))
def test_tickets_are_shared_by_weight_and_numbered_in_each_source(weights: list[float], first: int) -> None:
    drawn = [share_tickets(weights, ticket) for ticket in range(first, first + 40)]
    for source, weight in enumerate(weights):
        numbers = [number for chosen, number in drawn if chosen == source]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        share = weight / sum(weights)
        assert abs(len(numbers) - 40 * share) < len(weights)
        assert all(abs(number - first * share) < 41 for number in numbers)


def test_a_ticket_has_the_task_of_its_source_with_its_settings(tasks: TasksConfig) -> None:
    source = make_source(tasks)
    assert isinstance(source, TaskMix)
    drawn = [source.training_task(5, ticket) for ticket in range(5 * ROWS)]
    assert Counter(task.part for task in drawn) == {"miniwob": 3 * ROWS, "sites": ROWS, "web": ROWS}
    assert {(task.part, task.max_steps) for task in drawn} == {("miniwob", 7), ("sites", 4), ("web", 7)}
    assert len({task.id for task in drawn if task.part == "web"}) == ROWS  # every row before one is repeated
    for task in drawn:
        assert referenced_task(source, TaskReference.of(task)) == task
    with pytest.raises(ConfigError, match=r"tasks.mix has no 'webb', of which the trainer drew 'task-0'; near: web"):
        referenced_task(source, TaskReference("task-0", "page", 0, 3, "webb"))
    source.close()
    latencies = {each.settings.latency.median_seconds for each in source.sources.values()}  # type: ignore[attr-defined]
    assert latencies == {2.0}


def test_an_evaluation_has_as_many_tasks_of_each_environment(tasks: TasksConfig) -> None:
    config, source = Config(), make_source(tasks)
    config.tasks, config.evaluation.episodes, config.evaluation.skip = tasks, 2, 1
    indices = evaluation_task_indices(config)
    held_out = [source.held_out_task(index) for index in indices]
    found = Counter((task.part, task.environment) for task in held_out)
    environments = ("miniwob", "click-test"), ("miniwob", "click-tab"), ("sites", "forms-vote")
    assert {name: found.pop(name) for name in environments} == dict.fromkeys(environments, 2)
    assert sum(found.values()) == 2
    assert [task.id for task in held_out if task.part == "web"] == ["task-21", "task-22"]
    assert len({task.id for task in held_out}) == len(indices) == 8
    config.evaluation.episodes = 4
    with pytest.raises(ConfigError, match=r"skip \+ evaluation.episodes is 5, but web of tasks.mix has 4 held-out"):
        evaluation_task_indices(config)
    source.close()


def test_files_of_a_mix_are_the_same_on_all_nodes_and_after_a_restart(tasks: TasksConfig, tmp_path: Path) -> None:
    digests = task_file_digests(tasks)
    assert list(digests) == ["tasks.mix.web.train_file", "tasks.mix.web.test_file"]
    assert difference_from_checkpoint({"files": digests}, digests) is None
    write_rows(tmp_path / "train.jsonl", [webgym_row(number) for number in range(ROWS + 1)])
    message = difference_from_checkpoint({"files": digests}, task_file_digests(tasks))
    assert message is not None
    assert message.startswith(f"tasks.mix.web.train_file={tmp_path / 'train.jsonl'} has the digest ")


def test_each_source_is_decided_by_its_evaluators(tasks: TasksConfig) -> None:
    settings = JudgeConfig(evaluators=["page", "exact_answer"], combine="all")
    episode = replace(trajectory(0, 0, reward=1.0), end_reason="done")

    async def evaluators(part: str) -> str:
        async with open_evaluator(settings, LocalMeter(settings.budget), {"web": ["exact_answer"]}) as evaluator:
            verdict = await evaluator.evaluate(replace(episode, task=replace(episode.task, part=part)))
            return verdict.evaluator

    assert asyncio.run(evaluators("miniwob")) == "all(page, exact_answer)"
    assert asyncio.run(evaluators("web")) == "exact_answer"
    assert tasks.evaluators == {"web": ["judge"]}  # type: ignore[attr-defined]


def test_the_documented_mix_draws_from_each_source(tasks: TasksConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = blocks_run_by(__file__, "docs/tasks.md", "yaml", "Several sources")
    monkeypatch.chdir(Path(tasks.mix[2]["train_file"]).parent)  # type: ignore[attr-defined]
    Path("mix.yaml").write_text(block)
    documented = parse_config("mix.yaml").tasks
    documented.check()
    source = make_source(documented)
    drawn = [source.training_task(0, ticket) for ticket in range(10)]
    assert Counter(task.part for task in drawn) == {"miniwob": 6, "sites": 2, "web": 2}
    assert {task.max_steps for task in drawn if task.part == "sites"} == {20}
    source.close()


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ([{"source": "miniwob"}], "tasks.source=mix needs at least two sources in tasks.mix"),
        ([{"environments": ["a"]}, {"source": "sites"}], "tasks.mix[0] names no source; one of miniwob, sites, "),
        ([{"source": "miniwub"}, {"source": "sites"}], "tasks.mix[0].source='miniwub' is not one of miniwob, "),
        ([{"source": "mix"}, {"source": "sites"}], "tasks.mix[0].source=mix: a mix has no mix"),
        ([{"source": "miniwob"}] * 2, "tasks.mix: two sources have the name miniwob; give each a name of its own"),
        ([{"source": "miniwob"}, {"source": "miniwob", "name": "b"}],
         "tasks.mix: click-test is an environment of miniwob and of b; of one only"),
        ([{"source": "miniwob", "name": "a b"}, {"source": "sites"}], "tasks.mix[0].name='a b' is not made of letters"),
        ([{"source": "miniwob", "weight": 0}, {"source": "sites"}], "tasks.mix[0].weight=0.0 must be greater than 0"),
        ([{"source": "miniwob", "weight": "x"}, {"source": "sites"}], "tasks.mix[0].weight: Value 'x' of type 'str'"),
        ([{"source": "miniwob", "max_step": 3}, {"source": "sites"}], "tasks.mix[0].max_step: Key 'max_step' not in"),
        ([{"source": "miniwob", "max_steps": 0}, {"source": "sites"}], "tasks.mix[0].max_steps=0 must be at least 1"),
        ([{"source": "miniwob", "latency": {"median_seconds": 1}}, {"source": "sites"}],
         "tasks.mix[0].latency holds for all sources; set tasks.latency"),
        ([{"source": "miniwob", "environments": []}, {"source": "sites"}], "tasks.mix[0].environments is empty"),
        ([{"source": "miniwob", "evaluators": ["jugde"]}, {"source": "sites", "environments": ["forms-vote"]}],
         "tasks.mix: the evaluators of miniwob: 'jugde' is not one of judge.evaluators; near: judge"),
        ([{"source": "miniwob"}, {"source": "webgym"}], "tasks.source=webgym needs tasks.train_file, tasks.test_file"),
    ],
)  # fmt: skip
def test_a_mix_that_cannot_be_is_refused_in_one_line(
    mix: list[dict[str, Any]], message: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(
        f"model: {{path: {tiny_model}}}\njudge: {{evaluators: [page, judge]}}\ntasks: {{source: mix, mix: {mix}}}\n"
    )
    assert cli.main(["train", str(tmp_path / "run.yaml"), "--check"]) == 2
    assert capsys.readouterr().err.startswith(f"webrl: {message}")


def test_an_evaluation_needs_no_training_files(tasks: TasksConfig, tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "train.jsonl").unlink()
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{path: {tiny_model}}}\ntasks: {{source: mix, mix: {tasks.mix}}}\n")  # type: ignore[attr-defined]
    config = parse_evaluation_config(EvaluatedCheckpoint.resolve(tiny_model), [str(path)])
    assert task_file_digests(config.tasks).keys() == {"tasks.mix.web.test_file"}
