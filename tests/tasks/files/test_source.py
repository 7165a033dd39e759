"""Tasks of training and test files: draws, order, step limits, websites apart, and `webrl tasks check`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl import cli
from megatron_webrl.browser.server.protocol import ResetRequest
from megatron_webrl.browser.server.task_catalog import TaskCatalog
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import GrowingStepsConfig, SamplerConfig, TasksConfig, tasks_config
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.tasks.files.source import FileTaskSource
from megatron_webrl.tasks.files.table import MAX_DOMAINS
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.tasks.source import HELD_OUT_SEEDS, held_out_environment_and_seed
from tests.tasks.files.webgym_rows import webgym_row, write_rows

TRAINING_ROWS, TEST_ROWS = 30, 5


@pytest.fixture
def tasks(tmp_path: Path) -> TasksConfig:
    training = [webgym_row(number, domain=f"Domain {number % 2}") for number in range(TRAINING_ROWS)]
    facts = (3, 4, 6, 7, 40)
    test = [webgym_row(100 + n, domain="Tests & more", difficulty=facts[n]) for n in range(TEST_ROWS)]
    return tasks_config(
        source="webgym", train_file=str(write_rows(tmp_path / "train.jsonl", training)),
        test_file=str(write_rows(tmp_path / "test.jsonl", test)),
        max_steps_by_difficulty={"easy": 10, "medium": 20}, max_steps=40,
        evaluation_max_steps_by_difficulty={"easy": 30, "medium": 50},
    )  # fmt: skip


@pytest.fixture
def source(tasks: TasksConfig) -> Iterator[FileTaskSource]:
    source = make_source(tasks)
    assert isinstance(source, FileTaskSource)
    yield source
    source.close()


def test_tickets_draw_every_row_and_follow_weights_and_blocks(tasks: TasksConfig, source: FileTaskSource) -> None:
    drawn = [source.training_task(3, ticket) for ticket in range(TRAINING_ROWS)]
    assert {task.id for task in drawn} == {f"task-{number}" for number in range(TRAINING_ROWS)}
    assert {(task.difficulty, task.max_steps) for task in drawn} == {("easy", 10), ("medium", 20), ("hard", 40)}
    [first] = [task for task in drawn if task.id == "task-0"]
    assert (first.source, first.url, first.website) == ("web", "https://site0.example.com", "site0.example.com")
    assert (first.environment, first.domain, first.answer) == ("domain-0", "Domain 0", "0 dollars")
    knowledge = SamplerKnowledge(blocked={f"site{number}.example.com": 1e12 for number in range(TRAINING_ROWS - 2)})
    websites = {source.training_task(0, ticket, knowledge).website for ticket in range(60)}
    assert websites == {f"site{number}.example.com" for number in range(TRAINING_ROWS - 2, TRAINING_ROWS)}
    tasks.sampler = SamplerConfig("ratio", weights={"easy": 1, "medium": 0, "hard": 0})
    other = FileTaskSource(tasks)
    assert {other.training_task(0, ticket).difficulty for ticket in range(50)} == {"easy"}
    other.close()
    config = Config()
    config.browser.open_web = True
    catalog = TaskCatalog.from_config(config)
    assert catalog.resolve_task(ResetRequest(task=first)) == first  # a browser server opens it as a web page
    catalog.close()


def test_evaluation_takes_the_test_rows_in_order(source: FileTaskSource) -> None:
    held_out = [source.held_out_task(index) for index in range(TEST_ROWS)]
    assert [(task.id, task.difficulty, task.max_steps) for task in held_out] == [
        ("task-100", "easy", 30), ("task-101", "medium", 50), ("task-102", "medium", 50), ("task-103", "hard", 40),
        ("task-104", "hard", 40),
    ]  # fmt: skip
    with pytest.raises(IndexError, match=r"test\.jsonl has 5 rows; there is no evaluation task 5$"):
        source.held_out_task(TEST_ROWS)
    assert [source.evaluation_tasks(episodes) for episodes in (0, 1, 5, 6)] == [5, 1, 5, 5]


def test_a_growing_step_limit_follows_the_version_up_to_that_of_the_difficulty(tasks: TasksConfig) -> None:
    tasks.growing_steps = GrowingStepsConfig(interval=10, initial=6, max=26, cap_step=40)
    source = FileTaskSource(tasks)

    def limits(version: int) -> dict[str, int]:
        drawn = [source.training_task(0, ticket, SamplerKnowledge(version)) for ticket in range(TRAINING_ROWS)]
        return {task.difficulty: task.max_steps for task in drawn}

    assert limits(9) == {"easy": 6, "medium": 6, "hard": 6}
    assert limits(39) == {"easy": 10, "medium": 20, "hard": 21}
    assert limits(40) == limits(1000) == {"easy": 10, "medium": 20, "hard": 26}
    assert source.held_out_task(4).max_steps == 26  # hard: the last limit of training
    source.close()


def test_files_that_share_a_website_are_refused(tasks: TasksConfig, tmp_path: Path) -> None:
    rows = [webgym_row(200 + number, website=f"http://www.SITE{number}.example.com/start") for number in range(7)]
    tasks.test_file = str(write_rows(tmp_path / "shared.jsonl", rows))
    names = ", ".join(f"site{number}.example.com" for number in range(5))
    with pytest.raises(
        ConfigError, match=f"{tasks.train_file} and .*{tasks.test_file} share 7 websites: {names}, ...;"
    ):
        FileTaskSource(tasks)
    tasks.allow_shared_websites = True
    FileTaskSource(tasks).close()


def test_either_file_may_be_missing(tasks: TasksConfig) -> None:
    training_only = FileTaskSource(tasks_config(source="webgym", train_file=tasks.train_file))
    assert training_only.training_task(0, 0).instruction
    assert training_only.evaluation_tasks(10) == 0
    with pytest.raises(ConfigError, match=r"an evaluation needs tasks\.test_file"):
        training_only.held_out_task(0)
    training_only.close()
    test_only = FileTaskSource(tasks_config(source="webgym", test_file=tasks.test_file))
    assert test_only.environments == ("tests-more",)
    with pytest.raises(ConfigError, match=r"training needs tasks\.train_file"):
        test_only.training_task(0, 0)
    test_only.close()


def test_environments_are_the_domains_and_rows_can_be_made_by_number(source: FileTaskSource) -> None:
    assert source.environments == ("domain-0", "domain-1", "tests-more")
    assert source.make_task("domain-1", 7).id == "task-7"
    with pytest.raises(ValueError, match=r"row 7 of .*train\.jsonl is of domain-1, not of domain-0"):
        source.make_task("domain-0", 7)
    with pytest.raises(ValueError, match=r"train\.jsonl has no row 30; it has 30 rows, from 0"):
        source.make_task("domain-0", 30)
    with pytest.raises(KeyError):
        asyncio.run(source.demonstrate(None, source.held_out_task(0)))  # type: ignore[arg-type]


def test_a_replaced_file_stays_an_overwritten_one_fails(
    tasks: TasksConfig, source: FileTaskSource, tmp_path: Path
) -> None:
    path, before = Path(tasks.test_file), source.held_out_task(1)
    replacement = write_rows(tmp_path / "other.jsonl", [webgym_row(number) for number in range(50)])
    replacement.rename(path)
    assert source.held_out_task(1) == before
    training = Path(tasks.train_file)
    task = source.make_task("domain-1", 1)
    with training.open("r+b") as file:
        content = file.read()
        file.seek(0)
        file.write(content.replace(b'"task-1"', b'"task-x"'))
    with pytest.raises(
        ConfigError, match=r"train\.jsonl:2: the file changed while it was in use \(the task is 'task-x'"
    ):
        source.make_task(task.environment, 1)


def test_the_tasks_of_an_evaluation_are_known_without_a_source(tasks: TasksConfig) -> None:
    config = Config(tasks=tasks)
    for skip, episodes, expected in (
        (0, 0, range(5)), (0, 3, range(3)), (0, 50, range(5)), (3, 0, range(3, 5)), (3, 1, range(3, 4)),
        (3, 50, range(3, 5)),
    ):  # fmt: skip
        config.evaluation.skip, config.evaluation.episodes = skip, episodes
        assert evaluation_task_indices(config) == expected
    config.evaluation.skip = 5
    with pytest.raises(ConfigError, match=r"evaluation.skip=5 leaves none of the 5 held-out tasks; lower it"):
        evaluation_task_indices(config)
    environments = Config(tasks=tasks_config(environments=["click-test", "focus-text"]))
    environments.evaluation.episodes, environments.evaluation.skip = 7, 1000  # pages of each environment
    indices = evaluation_task_indices(environments)
    assert indices == range(2000, 2014)
    pages = [seed - HELD_OUT_SEEDS.start for _, seed in (held_out_environment_and_seed(i, 2) for i in indices)]
    assert sorted(set(pages)) == list(range(1000, 1007))


def test_domains_of_a_file_with_too_many_are_one_environment(tmp_path: Path) -> None:
    rows = [webgym_row(number, domain=f"Domain {number}") for number in range(MAX_DOMAINS + 1)]
    source = FileTaskSource(tasks_config(source="webgym", train_file=str(write_rows(tmp_path / "train.jsonl", rows))))
    assert source.environments == ("page",)
    assert source.training_task(0, 0).environment == "page"
    assert source.training_task(0, 0).domain.startswith("Domain ")
    source = FileTaskSource(tasks_config(source="webgym", train_file=str(write_rows(tmp_path / "b.jsonl", rows[1:]))))
    assert len(source.environments) == MAX_DOMAINS


ROWS = [webgym_row(number, benchmark_name="A" if number % 4 else "B") for number in range(40)]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "train.jsonl", ROWS)


def check(*arguments: object) -> int:
    return cli.main(["tasks", "check", *map(str, arguments)])


def report(folder: Path, code: int, *arguments: object) -> dict[str, Any]:
    assert check(*arguments, "--json", folder / "report.json") == code
    return json.loads((folder / "report.json").read_text())


def test_a_file_without_faults_is_counted(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path, 0, file)
    assert found["difficulties"] == {"easy": 15, "medium": 13, "hard": 12}
    assert (found["tasks"], found["websites"], found["facts"], found["with_answer"]) == (40, 40, 40, 40)
    assert (found["benchmarks"], found["domains"]) == ({"A": 30, "B": 10}, {"Shopping & Food": 40})
    assert (found["faulty"], found["invalid"]["count"], found["duplicates"]["count"]) == (False, 0, 0)
    assert found["other_difficulty"] == 35  # of 40, whose difficulties are 1 to 9 and which have one fact each
    output = capsys.readouterr().out
    assert f"{file}: 40 tasks on 40 websites, 40 facts, 40 with a reference answer" in output.splitlines()
    assert "│ easy       │    15 │ 37.5% │" in output


def test_rows_that_do_not_fit_and_equal_tasks_are_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        *(row | {"domain": "d" * 200} for row in ROWS),
        webgym_row(3, task_id="another", website="https://www.SITE3.example.com/start"),
        webgym_row(99, task_id="task-4"),
        *(webgym_row(number, website="none") for number in range(42, 71)),
    ]
    file = write_rows(tmp_path / ("a" * 150), rows)
    found = report(tmp_path, 1, file)
    assert found["duplicates"]["messages"] == [f"{file}:41: the task of line 4 again: Find the price of item 3"]
    first, *others = found["invalid"]["messages"]
    assert (found["invalid"]["count"], len(others)) == (30, 19)
    assert first == f"{file}:42: field task_id: expected an id of its own, found 'task-4' of line 5 again"
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"  {file}:43: field website: ") and line.endswith('"none"') for line in lines)
    assert "and 10 more" in " ".join(lines)
    assert all(len(line) <= 140 for line in lines if line.startswith("│"))


def test_websites_of_both_files_are_a_fault(file: Path, tmp_path: Path) -> None:
    apart = write_rows(tmp_path / "apart.jsonl", [webgym_row(number) for number in range(50, 60)])
    assert check(file, "--against", apart) == 0
    shared = write_rows(tmp_path / "shared.jsonl", [webgym_row(number) for number in range(38, 60)])
    found = report(tmp_path, 1, file, "--against", shared)
    assert found["shared_websites"] == ["site38.example.com", "site39.example.com"]
    assert (found["against"]["tasks"], found["faulty"]) == (22, True)


def test_bad_input_ends_with_code_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["no.jsonl"], "FILE=no.jsonl is neither a file nor a folder here"),
        ([file, "--against", "no.jsonl"], "--against=no.jsonl is neither a file nor a folder here"),
        ([file, "--field", "goal"], "--field='goal' is not of the form TASK_FIELD=FIELD"),
        ([file, "--format", "file", "--field", "id=task_id"], "does not know the fields instruction, website"),
        ([file, "--json", "/no/such/folder/report.json"], "/no/such/folder is not a folder"),
    ):
        assert check(*arguments) == 2
        assert message in capsys.readouterr().err
