"""`webrl tasks check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl import cli
from tests.tasks.files.webgym_rows import webgym_row, write_rows

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


def test_rows_that_do_not_fit_and_equal_tasks_are_faults_on_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.jsonl"], "FILE=no.jsonl is neither a file nor a folder here"),
        (["FILE", "--against", "no.jsonl"], "--against=no.jsonl is neither a file nor a folder here"),
        (["FILE", "--field", "goal"], "--field='goal' is not of the form TASK_FIELD=FIELD"),
        (["FILE", "--field", "instructions=goal"], "tasks.fields: 'instructions' is not one of"),
        (["FILE", "--format", "file", "--field", "id=task_id"], "does not know the fields instruction, website"),
        (["FILE", "--json", "/no/such/folder/report.json"], "/no/such/folder is not a folder"),
    ],
)
def test_bad_input_ends_with_code_2(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*(str(file) if argument == "FILE" else argument for argument in arguments)) == 2
    assert message in capsys.readouterr().err
