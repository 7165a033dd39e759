"""Task files about the offline websites."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from megatron_webrl.tasks.sites.websites import DENYING_NUMBERS, is_offline_host, page_key_of_path
from tools.make_webgym_tasks import main
from tools.offline.task_rows import LEVELS, level_of, read_tasks, read_truth

FIELDS = ["benchmark_name", "task_name", "domain", "subdomain", "website", "definite_answer", "task_id", "difficulty",
          "evaluator_reference"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tasks")
    assert main([str(path)]) == 0
    return path


def rows(folder: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]


def host(row: dict[str, Any]) -> str:
    return urlsplit(row["website"]).hostname or ""


def test_the_files_have_the_format_and_the_mixture_that_they_promise(folder: Path) -> None:
    train, test = rows(folder, "train"), rows(folder, "test")
    assert (len(train), len(test)) == (200, 40)
    for row in (*train, *test):
        assert list(row) == FIELDS
        assert is_offline_host(host(row))
        assert row["website"].startswith(f"http://{host(row)}/")
        facts = [fact for group in row["evaluator_reference"] for fact in group["facts"]]
        assert row["difficulty"] == len(facts) > 0
        assert all(set(group) == {"id", "description", "facts"} for group in row["evaluator_reference"])
        assert row["definite_answer"]
    for found, least in ((train, 25), (test, 5)):
        assert set(Counter(level_of(row["difficulty"]) for row in found)) == set(LEVELS)
        assert min(Counter(row["domain"] for row in found).values()) >= len(found) // 5
        assert sum(row["definite_answer"] in ("yes", "no") for row in found) >= least
    assert len({row["subdomain"] for row in train}) >= 35
    assert len({host(row) for row in train}) >= 50
    denying = [row for row in train if int(host(row).partition("-")[2].partition(".")[0]) in DENYING_NUMBERS]
    assert 8 <= len(denying) <= 12
    assert len({row["domain"] for row in denying}) == 5


def test_files_share_no_website_and_no_instruction_occurs_twice(folder: Path) -> None:
    train, test = rows(folder, "train"), rows(folder, "test")
    assert not {host(row) for row in train} & {host(row) for row in test}
    for field in ("task_name", "task_id"):
        assert len({row[field] for row in (*train, *test)}) == len(train) + len(test)


def test_the_truth_belongs_to_the_rows(folder: Path) -> None:
    truths, tasks = {truth.task_id: truth for truth in read_truth(folder)}, read_tasks(folder)
    assert set(truths) == set(tasks)
    for id, (task, goal) in tasks.items():
        truth = truths[id]
        assert (truth.instruction, truth.host, truth.kind) == (task.instruction, task.website, task.subdomain)
        assert task.answer in truth.answers
        assert [fact.text for fact in truth.facts] == [fact.fact for fact in task.facts]
        assert bool(truth.effects) == bool(goal.goal.effects)
        assert truth.effects or any(fact.pages for fact in truth.facts)
        pages = {page for fact in truth.facts for page in fact.pages}
        assert all(page.startswith(f"{truth.host}/") for page in pages)
        assert task.url == f"http://{truth.host}{goal.goal.start_path}"
        if goal.kind.endswith(("find-price", "is-mayor")):
            assert page_key_of_path(truth.host, goal.goal.start_path) in pages


def test_equal_arguments_give_equal_files_and_other_seeds_others(folder: Path, tmp_path: Path) -> None:
    for name, seed in (("again", "0"), ("other", "1")):
        assert main([str(tmp_path / name), "--seed", seed]) == 0
    for file in ("train.jsonl", "test.jsonl", "truth.jsonl"):
        assert (tmp_path / "again" / file).read_bytes() == (folder / file).read_bytes()
        assert (tmp_path / "other" / file).read_bytes() != (folder / file).read_bytes()


def test_a_file_without_training_tasks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--tasks", "40", "--test", "40"]) == 2
    assert "--test=40 of --tasks=40 leaves no task of training" in capsys.readouterr().err
