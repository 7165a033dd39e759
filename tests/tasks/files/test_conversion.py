"""Parquet files, JSON arrays, and datasets of Hugging Face as task files."""

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
from megatron_webrl.tasks.files.rows import FORMATS
from megatron_webrl.tasks.files.table import TaskTable, load_tasks
from tests.tasks.files.webgym_rows import webgym_row, write_rows

WEBGYM = FORMATS["webgym"]
ROWS = [webgym_row(number) for number in range(2500)]


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))


def load(text: str | Path) -> TaskTable:
    return load_tasks(str(text), "tasks.train_file", WEBGYM)


def ids_of(text: str | Path) -> list[str]:
    """The ids of the tasks of a training file, in the order of its rows."""
    table = load(text)
    assert table[3].facts[0].fact == f"It costs {table[3].answer}"
    return [table[row].id for row in range(len(table))]


EXPECTED = [row["task_id"] for row in ROWS]


def test_a_parquet_file_is_read_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    table = pyarrow.Table.from_pylist(ROWS)
    # A column of no field of a task, which is not read: JSON has no bytes.
    parquet.write_table(table.append_column("screenshot", pyarrow.array([b"\x00" * 10] * len(ROWS))), path)
    assert ids_of(path) == EXPECTED
    parquet.write_table(table.slice(0, 10), path)
    assert ids_of(path) == EXPECTED[:10]


def test_rows_of_a_parquet_file_are_named_by_its_name_and_their_number(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    rows = [*ROWS[:4], {**ROWS[4], "website": "Amazon"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError, match=rf"\n{path}:5: field website: expected .* found \"Amazon\"$"):
        load(path)


def test_a_json_array_is_read_as_rows(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(ROWS[:20], indent=2))
    assert ids_of(path) == EXPECTED[:20]
    path.write_text("[{}")
    with pytest.raises(ConfigError, match=r"tasks\.json:1: expected a JSON array, found invalid JSON: Expecting ','"):
        load(path)
    for text, message in (
        (b'[\n{"task_id": 1},\n{"a": "caf\xe9"}]', ": expected a JSON array, found invalid JSON: 'utf-8' codec"),
        (b"[" * 100_000, ": expected a JSON array, found invalid JSON: maximum recursion depth exceeded"),
        (b'[{"a": NaN}]', ": expected a JSON array, found invalid JSON: NaN is not JSON"),
        (b'[{"a": 1, "a": 2}]', ': expected a JSON array, found invalid JSON: the key "a" occurs twice'),
    ):
        path.write_bytes(text)
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value).startswith(f"{path}{message}")


def test_a_saved_dataset_is_read_with_or_without_splits(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS[:1200])
    dataset.save_to_disk(tmp_path / "one")
    assert ids_of(tmp_path / "one") == EXPECTED[:1200]
    splits = datasets.DatasetDict({"train": dataset, "test": datasets.Dataset.from_list(ROWS[1200:1300])})
    splits.save_to_disk(tmp_path / "both")
    assert ids_of(f"{tmp_path / 'both'}:test") == EXPECTED[1200:1300]
    with pytest.raises(ConfigError, match=r"both has several splits; name one, such as .*both:train$"):
        load(tmp_path / "both")
    with pytest.raises(ConfigError, match=r"both has no split dev; name one, such as .*both:train$"):
        load(f"{tmp_path / 'both'}:dev")


def test_a_folder_of_data_files_is_read_as_the_hub_would_give_it(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    write_rows(folder / "data" / "train.jsonl", ROWS[:30])
    write_rows(folder / "data" / "test.jsonl", ROWS[30:40])
    assert ids_of(f"{folder}:test") == EXPECTED[30:40]
    with pytest.raises(ConfigError, match=r"is a folder of data files; name its split, such as .*:train$"):
        load(folder)
    with pytest.raises(ConfigError, match=r"^tasks\.train_file=.*repository:dev cannot be read: "):
        load(f"{folder}:dev")


def test_a_name_that_is_nothing_is_refused() -> None:
    for text in ("train.jsn", "/data/train:test", "a/b/c:train"):
        with pytest.raises(ConfigError, match=rf"^tasks\.train_file={text} is neither a file nor a folder here; give"):
            load(text)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS[:3]), path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"needs the package pyarrow; pip install 'megatron_webrl\[datasets\]'$"):
        load(path)
    with pytest.raises(ConfigError, match=r"^org/name needs the package datasets; pip install"):
        load("org/name:train")


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"caf\xe9", r"bytes b'caf\xe9'"),
        (datetime.date(2026, 1, 2), "date datetime.date(2026, 1, 2)"),
        (math.inf, "float inf"),
        ([math.nan], "list [nan]"),
    ],
)
def test_a_value_that_json_does_not_have_is_refused_by_file_row_and_field(
    tmp_path: Path, value: Any, found: str
) -> None:
    path = tmp_path / "train.parquet"
    rows = [{**ROWS[0], "task_name": None}, {**ROWS[1], "task_name": value}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    with pytest.raises(ConfigError) as caught:
        load(path)
    expected = "text, numbers, true, false, null, lists or structures of them"
    assert str(caught.value) == f"{path}:2: field task_name: expected {expected}, found {found}"


def test_nan_of_a_column_is_a_missing_value(tmp_path: Path) -> None:
    rows = [{**ROWS[number], "definite_answer": answer} for number, answer in enumerate((1.5, math.nan))]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for name in ("train.parquet", "saved"):
        table = load(tmp_path / name)
        assert [table[row].answer for row in range(2)] == ["1.5", None]
    needed = pyarrow.Table.from_pylist([{**ROWS[0], "difficulty": math.nan}])
    parquet.write_table(needed, tmp_path / "train.parquet")
    with pytest.raises(ConfigError, match=r"train\.parquet:1: field difficulty: expected an integer .* found null"):
        load(tmp_path / "train.parquet")


def test_a_dataset_without_any_wanted_column_names_what_it_has(tmp_path: Path) -> None:
    rows = [{"goal": "Buy a lamp", "page": "lamps.example"}]
    (tmp_path / "hub").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    write_rows(tmp_path / "hub" / "train.jsonl", rows)
    for name in ("train.parquet", "saved", "hub:train"):
        with pytest.raises(ConfigError, match=r"has the columns goal, page, but none of task_id, .*tasks\.fields$"):
            load(tmp_path / name)
