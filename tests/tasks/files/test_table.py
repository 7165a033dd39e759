"""The tasks of a task file in memory: what samplers need of them, when they are read again, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.files import table as module
from megatron_webrl.tasks.files.rows import FORMATS, make_field_map
from megatron_webrl.tasks.files.table import MAX_DOMAINS, TaskTable, load_tasks
from megatron_webrl.tasks.sampler.knowledge import task_key
from megatron_webrl.types import DIFFICULTIES
from tests.tasks.files.webgym_rows import webgym_row, write_rows

WEBGYM = FORMATS["webgym"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [webgym_row(number, website=f"www.site{number % 7}.com") for number in range(50)]
    return write_rows(tmp_path / "tasks.jsonl", rows)


def load(path: Path) -> TaskTable:
    return load_tasks(str(path), "tasks.train_file", WEBGYM)


def test_a_table_has_every_task_and_what_samplers_need(path: Path) -> None:
    table = load(path)
    assert [table[row].id for row in range(50)] == [f"task-{row}" for row in range(50)]
    assert [table.websites[site] for site in table.website_ids] == [f"site{row % 7}.com" for row in range(50)]
    assert table.task_keys.tolist() == [task_key(f"task-{row}") for row in range(50)]
    assert [DIFFICULTIES[level] for level in table.levels[:7]] == ["easy"] * 3 + ["medium"] * 3 + ["hard"]
    assert table.domains == ["shopping-food"]


def test_the_digest_is_that_of_the_rows_and_their_fields(path: Path, tmp_path: Path) -> None:
    digest, data = load(path).digest, path.read_bytes()
    other = load_tasks(str(path), "tasks.train_file", make_field_map("webgym", {"subdomain": "domain"}))
    assert other.digest != digest
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(data.replace(b"\n", b"\n\n"))
    assert load(copy).digest == digest
    copy.write_bytes(data.replace(b"item 25", b"item 52"))
    assert load(copy).digest != digest


def test_a_file_is_read_once_and_again_when_it_changes(path: Path) -> None:
    table = load(path)
    assert load(path) is table
    write_rows(path, [webgym_row(3)])
    assert len(load(path)) == 1


def test_files_that_are_empty_missing_or_growing_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ConfigError, match=r"empty\.jsonl holds no tasks$"):
        load(empty)
    with pytest.raises(ConfigError, match=r"^tasks\.train_file=.*gone\.jsonl is neither a file nor a folder here"):
        load(tmp_path / "gone.jsonl")
    parse_task = module.parse_task

    def parse_while_it_grows(*arguments: object) -> object:
        with path.open("a") as more:
            more.write("\n")
        return parse_task(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("megatron_webrl.tasks.files.reading.parse_task", parse_while_it_grows)
    with pytest.raises(ConfigError, match=r"tasks\.jsonl changed while it was read"):
        load(path)


def test_tasks_of_very_many_domains_have_one_environment(tmp_path: Path) -> None:
    rows = [webgym_row(number, domain=f"domain {number}") for number in range(MAX_DOMAINS + 1)]
    assert load(write_rows(tmp_path / "many.jsonl", rows)).domains == []
    assert len(load(write_rows(tmp_path / "fewer.jsonl", rows[1:])).domains) == MAX_DOMAINS


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "tasks.jsonl", [webgym_row(1)])
    path.write_bytes(b"\xef\xbb\xbf\r\n \n" + path.read_bytes().replace(b"\n", b"\r\n") + b"\n\n")
    assert load(path)[0].id == "task-1"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(webgym_row(2)).encode())
    assert load(path)[0].id == "task-2"
