"""`webrl tasks check`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl import cli
from tests.tasks.files.webgym_rows import webgym_row, write_rows


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [webgym_row(number, benchmark_name="A" if number % 4 else "B") for number in range(40)]
    return write_rows(tmp_path / "train.jsonl", rows)


def check(*arguments: object) -> int:
    return cli.main(["tasks", "check", *map(str, arguments)])


def report(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_file_without_faults_is_counted(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(file, "--json", tmp_path / "report.json") == 0
    found = report(tmp_path / "report.json")
    assert found["difficulties"] == {"easy": 15, "medium": 13, "hard": 12}
    assert (found["tasks"], found["websites"], found["facts"], found["with_answer"]) == (40, 40, 40, 40)
    assert found["benchmarks"] == {"A": 30, "B": 10}
    assert found["domains"] == {"Shopping & Food": 40}
    assert (found["faulty"], found["invalid"]["count"], found["duplicates"]["count"]) == (False, 0, 0)
    output = capsys.readouterr().out
    assert f"{file}: 40 tasks on 40 websites, 40 facts, 40 with a reference answer" in output.splitlines()
    assert "│ easy       │    15 │ 37.5% │" in output
    assert "rows that do not fit: 0" in output
    assert found["other_difficulty"] == 35  # of 40, whose difficulties are 1 to 9 and which have one fact each
    assert "tasks whose difficulty is not their number of facts: 35 (no fault)" in output


@pytest.mark.parametrize("length", [50, 84, 200])
def test_a_message_is_one_line_however_long_the_name_of_the_file_is(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a" * length
    monkeypatch.chdir(tmp_path)
    write_rows(
        tmp_path / name,
        [
            *(webgym_row(number, domain="d" * 200) for number in range(39)),
            webgym_row(40, website="none"),
        ],
    )
    assert check(name) == 1
    lines = capsys.readouterr().out.splitlines()
    assert f"{name}: 39 tasks on 39 websites, 39 facts, 39 with a reference answer" in lines
    assert any(line.startswith(f"  {name}:40: field website: ") and line.endswith('"none"') for line in lines)
    assert all(len(line) <= 140 for line in lines if line.startswith("│"))


def test_the_first_twenty_rows_that_do_not_fit_are_listed(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with file.open("a") as more:
        more.writelines(json.dumps(webgym_row(number, difficulty=-1)) + "\n" for number in range(40, 70))
    assert check(file, "--json", tmp_path / "report.json") == 1
    invalid = report(tmp_path / "report.json")["invalid"]
    assert (invalid["count"], len(invalid["messages"])) == (30, 20)
    assert invalid["messages"][0].startswith(f"{file}:41: field difficulty: expected an integer from 0 to 1000")
    output = capsys.readouterr().out
    assert "rows that do not fit: 30" in output
    assert "and 10 more" in output


def test_equal_tasks_and_equal_ids_are_faults(file: Path, tmp_path: Path) -> None:
    same = webgym_row(3, task_id="another", website="https://www.SITE3.example.com/start")
    other = webgym_row(99, task_id="task-4")
    with file.open("a") as more:
        more.write(json.dumps(same) + "\n" + json.dumps(other) + "\n")
    assert check(file, "--json", tmp_path / "report.json") == 1
    found = report(tmp_path / "report.json")
    assert found["duplicates"]["messages"] == [f"{file}:41: the task of line 4 again: Find the price of item 3"]
    [message] = found["invalid"]["messages"]
    assert message == f"{file}:42: field task_id: expected an id of its own, found 'task-4' of line 5 again"


def test_websites_of_both_files_are_a_fault(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    apart = write_rows(tmp_path / "apart.jsonl", [webgym_row(number) for number in range(50, 60)])
    assert check(file, "--against", apart) == 0
    shared = write_rows(tmp_path / "shared.jsonl", [webgym_row(number) for number in range(38, 60)])
    assert check(file, "--against", shared, "--json", tmp_path / "report.json") == 1
    found = report(tmp_path / "report.json")
    assert found["shared_websites"] == ["site38.example.com", "site39.example.com"]
    assert (found["against"]["tasks"], found["faulty"]) == (22, True)
    assert "websites in both files: 2: site38.example.com, site39.example.com" in capsys.readouterr().out


def test_fields_of_another_file_can_be_named(tmp_path: Path) -> None:
    rows = [{"key": number, "goal": f"Goal {number}", "start": f"site{number}.org"} for number in range(3)]
    file = write_rows(tmp_path / "own.jsonl", rows)
    names = [text for name in ("id=key", "instruction=goal", "website=start") for text in ("--field", name)]
    assert check(file, "--format", "file", *names) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.jsonl"], "FILE=no.jsonl is neither a file nor a folder here"),
        (["FILE", "--against", "no.jsonl"], "--against=no.jsonl is neither a file nor a folder here"),
        (["FILE", "--field", "goal"], "--field='goal' is not of the form TASK_FIELD=FIELD"),
        (["FILE", "--field", "instructions=goal"], "tasks.fields: 'instructions' is not one of"),
        (["FILE", "--format", "file"], "tasks.source=file does not know the fields id, instruction, website"),
        (["FILE", "--json", "/no/such/folder/report.json"], "/no/such/folder is not a folder"),
    ],
)
def test_bad_input_ends_with_code_2(
    file: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(*(str(file) if argument == "FILE" else argument for argument in arguments)) == 2
    assert message in capsys.readouterr().err
