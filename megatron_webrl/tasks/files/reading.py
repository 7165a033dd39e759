"""Task files of every kind as JSON lines, and the task of each line."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.files.rows import FieldMap, RowError, parse_line, parse_task
from megatron_webrl.tasks.sampler.knowledge import task_key
from megatron_webrl.types import Task
from megatron_webrl.util import strict_json
from megatron_webrl.util.text import first_line, shorten

_BATCH_ROWS = 1000
_FOUND_CHARACTERS = 60
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # with or without an organisation
_INSTALL = "pip install 'megatron_webrl[datasets]'"


class ScannedLine(NamedTuple):
    """A line that is not blank, and either its task or what is wrong with it."""

    number: int  # from 1
    offset: int  # bytes
    data: bytes  # without the line's end
    key: int  # of the task
    task: Task | None
    error: str  # the message, with file and line; empty if there is a task


def scan(file: BinaryIO, name: str, fields: FieldMap) -> Iterator[ScannedLine]:
    """The lines of a file in order; messages call it `name`. Raises ConfigError if the file grows meanwhile."""
    lines_by_key: dict[int, int] = {}
    before, end = os.fstat(file.fileno()), 0
    for number, line in enumerate(file, 1):
        data = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
        offset, end = end + len(line) - len(data), end + len(line)
        data = data.rstrip(b"\r\n")
        if not data or data.isspace():
            continue
        try:
            task = parse_task(parse_line(data), fields)
            first = lines_by_key.setdefault(key := task_key(task.id), number)
            if first != number:
                [field, *_] = fields.names["id"]
                raise RowError(f"field {field}: expected an id of its own, found {task.id!r} of line {first} again")
        except RowError as error:
            yield ScannedLine(number, offset, data, 0, None, f"{name}:{number}: {error}")
        else:
            yield ScannedLine(number, offset, data, key, task, "")
    after = os.fstat(file.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise ConfigError(f"{name} changed while it was read; start again when it is complete")


def open_lines(text: str, setting: str, fields: FieldMap) -> BinaryIO:
    """A JSONL file, or a temporary file with a line for each row of a JSON or Parquet file, of a folder of a dataset
    (FOLDER or FOLDER:SPLIT), or of a dataset of the Hugging Face hub (NAME:SPLIT).

    `setting` names it in errors. Raises ConfigError.
    """
    try:
        path, (name, _, split) = Path(text), text.rpartition(":")
        if path.is_file():
            return _open_file(path, fields.columns)
        if path.is_dir():
            return _as_lines(text, _folder_rows(path, "", fields.columns))
        if name and Path(name).is_dir():
            return _as_lines(text, _folder_rows(Path(name), split, fields.columns))
        if split and _HUB_NAME.fullmatch(name):
            return _as_lines(text, _hub_rows(name, split, fields.columns))
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{setting}={text} cannot be read: {first_line(error)}") from error
    raise ConfigError(
        f"{setting}={text} is neither a file nor a folder here; give a JSONL or Parquet file, the folder of a dataset, "
        "or NAME:SPLIT of the Hugging Face hub"
    )


def _open_file(path: Path, columns: tuple[str, ...]) -> BinaryIO:
    file = path.open("rb")
    beginning = file.read(4096)
    if beginning.startswith(b"PAR1"):
        return _as_lines(str(path), _parquet_rows(path, columns))
    if beginning.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return _as_lines(str(path), _array_rows(path))
    file.seek(0)
    return file


def _as_lines(name: str, rows: Iterable[Any]) -> BinaryIO:
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    for number, row in enumerate(rows, 1):
        row = {key: None if _is_nan(value) else value for key, value in row.items()} if isinstance(row, dict) else row
        try:
            file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        except (TypeError, ValueError):
            key, value = next((key, value) for key, value in row.items() if not _is_json(value))
            expected = "text, numbers, true, false, null, lists or structures of them"
            found = f"{type(value).__name__} {shorten(repr(value), _FOUND_CHARACTERS)}"
            raise ConfigError(f"{name}:{number}: field {key}: expected {expected}, found {found}") from None
    file.seek(0)
    return file


def _is_nan(value: Any) -> bool:
    """Whether a value is the NaN by which pandas writes that a number is missing."""
    return isinstance(value, float) and math.isnan(value)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _array_rows(path: Path) -> Any:
    try:
        return strict_json.loads(path.read_text("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        place, message = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else "", first_line(error)
        raise ConfigError(f"{path}{place}: expected a JSON array, found invalid JSON: {message}") from None


def _present(source: object, columns: tuple[str, ...], found: Collection[str]) -> list[str]:
    """The columns that are read of those found. Raises ConfigError if it is none."""
    present = [name for name in columns if name in found]
    if not present:
        raise ConfigError(
            f"{source} has the columns {', '.join(found) or '(none)'}, but none of {', '.join(columns)}; set "
            "tasks.source to its format, or name its columns in tasks.fields"
        )
    return present


def _parquet_rows(path: Path, columns: tuple[str, ...]) -> Iterator[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} needs the package pyarrow; {_INSTALL}") from None
    with parquet.ParquetFile(path) as file:
        present = _present(path, columns, file.schema_arrow.names)
        for batch in file.iter_batches(_BATCH_ROWS, columns=present):
            yield from batch.to_pylist()


def _folder_rows(folder: Path, split: str, columns: tuple[str, ...]) -> Iterator[Any]:
    """Rows of what `save_to_disk` wrote, or of a folder of data files as the hub has them."""
    datasets = _import_datasets(folder)
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        if not split:
            raise ConfigError(f"{folder} is a folder of data files; name its split, such as {folder}:train")
        return _hub_rows(str(folder), split, columns)
    dataset = datasets.load_from_disk(str(folder))
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            chosen = f"no split {split}" if split else "several splits"
            raise ConfigError(f"{folder} has {chosen}; name one, such as {folder}:{next(iter(dataset))}")
        dataset = dataset[split]
    elif split and split != str(dataset.split):
        raise ConfigError(f"{folder} has no splits; leave :{split} out")
    return iter(dataset.select_columns(_present(folder, columns, dataset.column_names)))


def _hub_rows(name: str, split: str, columns: tuple[str, ...]) -> Iterator[Any]:
    """Rows of a dataset that `datasets` keeps in its cache folder, for all processes of a machine."""
    dataset = _import_datasets(name).load_dataset(name, split=split)
    return iter(dataset.select_columns(_present(name, columns, dataset.column_names)))


def _import_datasets(name: object) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{name} needs the package datasets; {_INSTALL}") from None
    return datasets
