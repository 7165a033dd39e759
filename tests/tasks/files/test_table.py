"""Task files of every kind in memory: JSON lines, JSON arrays, Parquet files, and datasets of Hugging Face."""

from __future__ import annotations

import datetime
import json
import math
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.files import table as module
from megatron_webrl.tasks.files.rows import FORMATS, make_field_map
from megatron_webrl.tasks.files.table import TaskTable, load_tasks
from megatron_webrl.tasks.sampler.knowledge import task_key
from megatron_webrl.types import DIFFICULTIES
from tests.tasks.files.webgym_rows import webgym_row, write_rows

WEBGYM = FORMATS["webgym"]
ROWS = [webgym_row(number, website=f"www.site{number % 7}.com") for number in range(2500)]
IDS = [row["task_id"] for row in ROWS]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "tasks.jsonl", ROWS[:50])


def load(text: str | Path) -> TaskTable:
    return load_tasks(str(text), "tasks.train_file", WEBGYM)


def ids_of(text: str | Path) -> list[str]:
    table = load(text)
    return [table[row].id for row in range(len(table))]


def write_parquet(path: Path, *rows: dict[str, Any]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def test_a_table_has_every_task_and_what_samplers_need(path: Path) -> None:
    table = load(path)
    assert [table[row].id for row in range(50)] == IDS[:50]
    assert [table.websites[site] for site in table.website_ids] == [f"site{row % 7}.com" for row in range(50)]
    assert table.task_keys.tolist() == [task_key(f"task-{row}") for row in range(50)]
    assert [DIFFICULTIES[level] for level in table.levels[:7]] == ["easy"] * 3 + ["medium"] * 3 + ["hard"]
    assert table.domains == ["shopping-food"]


def test_the_digest_is_that_of_the_rows_and_their_fields(path: Path, tmp_path: Path) -> None:
    digest, data = load(path).digest, path.read_bytes()
    other = load_tasks(str(path), "tasks.train_file", make_field_map("webgym", {"subdomain": "domain"}))
    assert other.digest != digest
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(b"\xef\xbb\xbf\r\n \n" + data.replace(b"\n", b"\r\n\n"))  # a byte order mark, blank lines
    assert load(copy).digest == digest
    assert ids_of(copy) == IDS[:50]
    copy.write_bytes(b"\xef\xbb\xbf" + data.replace(b"item 25", b"item 52"))
    assert load(copy).digest != digest
    assert load(copy)[0].id == IDS[0]


def test_a_changed_file_is_read_again_but_never_while_it_grows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = load(path)
    assert load(path) is table
    write_rows(path, [webgym_row(3)])
    assert len(load(path)) == 1
    path.write_text("\n")
    with pytest.raises(ConfigError, match=r"tasks\.jsonl holds no tasks$"):
        load(path)
    parse_task = module.parse_task

    def parse_while_it_grows(*arguments: object) -> object:
        with path.open("a") as more:
            more.write("\n")
        return parse_task(*arguments)  # type: ignore[arg-type]

    write_rows(path, ROWS[:5])
    monkeypatch.setattr("megatron_webrl.tasks.files.reading.parse_task", parse_while_it_grows)
    with pytest.raises(ConfigError, match=r"tasks\.jsonl changed while it was read"):
        load(path)


def test_rows_of_a_parquet_file_are_read_and_errors_name_them_by_number(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    table = pyarrow.Table.from_pylist(ROWS)
    # A column of no field of a task, which is not read: JSON has no bytes.
    parquet.write_table(table.append_column("screenshot", pyarrow.array([b"\x00" * 10] * len(ROWS))), path)
    assert ids_of(path) == IDS
    for field, value, found in (
        ("website", "Amazon", '"Amazon"'),
        ("task_name", b"caf\xe9", r"bytes b'caf\xe9'"),
        ("task_name", datetime.date(2026, 1, 2), "date datetime.date(2026, 1, 2)"),
        ("task_name", math.inf, "float inf"),
        ("task_name", [math.nan], "list [nan]"),
        ("difficulty", math.nan, "null"),
    ):
        write_parquet(path, ROWS[0] | ({field: None} if field == "task_name" else {}), ROWS[1] | {field: value})
        with pytest.raises(ConfigError) as caught:
            load(path)
        last = str(caught.value).splitlines()[-1]
        assert last.startswith(f"{path}:2: field {field}: expected ")
        assert last.endswith(f"found {found}")


def test_a_json_array_is_read_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(ROWS[:20], indent=2))
    assert ids_of(path) == IDS[:20]
    for text, message in (
        (b"[{}", ":1: expected a JSON array, found invalid JSON: Expecting ','"),
        (b'[\n{"task_id": 1},\n{"a": "caf\xe9"}]', ": expected a JSON array, found invalid JSON: 'utf-8' codec"),
        (b"[" * 100_000, ": expected a JSON array, found invalid JSON: maximum recursion depth exceeded"),
        (b'[{"a": NaN}]', ": expected a JSON array, found invalid JSON: NaN is not JSON"),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}{message}")


def test_saved_datasets_and_folders_of_data_files_are_read_with_or_without_splits(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS[:1200])
    dataset.save_to_disk(tmp_path / "one")
    assert ids_of(tmp_path / "one") == IDS[:1200]
    splits = datasets.DatasetDict({"train": dataset, "test": datasets.Dataset.from_list(ROWS[1200:1300])})
    splits.save_to_disk(tmp_path / "both")
    assert ids_of(f"{tmp_path / 'both'}:test") == IDS[1200:1300]
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    write_rows(folder / "data" / "train.jsonl", ROWS[:30])
    write_rows(folder / "data" / "test.jsonl", ROWS[30:40])
    assert ids_of(f"{folder}:test") == IDS[30:40]
    for name, message in (
        ("both", r"both has several splits; name one, such as .*both:train$"),
        ("both:dev", r"both has no split dev; name one, such as .*both:train$"),
        ("one:dev", "one has no splits; leave :dev out"),
        ("repository", r"is a folder of data files; name its split, such as .*:train$"),
        ("repository:dev", r"^tasks\.train_file=.*repository:dev cannot be read: "),
    ):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / name)


def test_nan_of_a_column_is_a_missing_value(tmp_path: Path) -> None:
    rows = [{**ROWS[number], "definite_answer": answer} for number, answer in enumerate((1.5, math.nan))]
    write_parquet(tmp_path / "train.parquet", *rows)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name in ("train.parquet", "saved"):
        table = load(tmp_path / name)
        assert [table[row].answer for row in range(2)] == ["1.5", None]


def test_what_cannot_be_read_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"goal": "Buy a lamp", "page": "lamps.example"}]
    (tmp_path / "hub").mkdir()
    write_parquet(tmp_path / "train.parquet", *rows)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    write_rows(tmp_path / "hub" / "train.jsonl", rows)
    for name in ("train.parquet", "saved", "hub:train"):
        with pytest.raises(ConfigError, match=r"has the columns goal, page, but none of task_id, .*tasks\.fields$"):
            load(tmp_path / name)
    for text in ("train.jsn", "/data/train:test", "a/b/c:train"):
        with pytest.raises(ConfigError, match=rf"^tasks\.train_file={text} is neither a file nor a folder here; give"):
            load(text)
    for package, name in (("pyarrow", str(tmp_path / "train.parquet")), ("datasets", "org/name:train")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            ConfigError, match=rf"needs the package {package}; pip install 'megatron_webrl\[datasets\]'$"
        ):
            load(name)
