"""Task files of every kind as JSONL: what is not JSONL is converted once, into the cache folder, one row a line."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tasks.files import index
from megatron_webrl.tasks.files.index import Fingerprint
from megatron_webrl.tasks.files.rows import BYTE_ORDER_MARK, FieldMap
from megatron_webrl.util import atomic_file, strict_json
from megatron_webrl.util.text import first_line, shorten

log = logging.getLogger(__name__)

VERSION = 2  # of what conversion writes: another one makes every file be converted again
_BATCH_ROWS = 1000
_FOUND_CHARACTERS = 60
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # with or without an organisation
_INSTALL = "pip install 'megatron_webrl[datasets]'"


@dataclass(frozen=True)
class TaskFile:
    """A task file as JSONL."""

    name: str  # as the configuration gives it; messages call it so. Line numbers are numbers of rows if converted
    path: Path


def resolve_task_file(text: str, setting: str, fields: FieldMap) -> TaskFile:
    """The JSONL of a JSONL, JSON or Parquet file, of a folder of a dataset (FOLDER or FOLDER:SPLIT), or of a dataset of
    the Hugging Face hub (NAME:SPLIT). `setting` names it in errors. Raises ConfigError.
    """
    path = Path(text)
    try:
        if path.is_file():
            return _resolve_file(text, path, fields)
        name, _, split = text.rpartition(":")
        folder = path if path.is_dir() else Path(name) if name and Path(name).is_dir() else None
        if folder is not None:
            return _convert_dataset(text, folder, "" if folder == path else split, fields)
        if split and _HUB_NAME.fullmatch(name):
            return _convert(text, ("hub", name, split), fields, _hub_rows(name, split, fields.columns))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{setting}={text} cannot be read: {first_line(error)}") from error
    raise ConfigError(
        f"{setting}={text} is neither a file nor a folder here; give a JSONL or Parquet file, the folder of a dataset, "
        "or NAME:SPLIT of the Hugging Face hub"
    )


def _resolve_file(text: str, path: Path, fields: FieldMap) -> TaskFile:
    with path.open("rb") as file:
        beginning = file.read(4096)
    key = (str(path.resolve()), Fingerprint.of(path))
    if beginning.startswith(b"PAR1"):
        return _convert(text, ("parquet", *key), fields, _parquet_rows(path, fields.columns))
    if beginning.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return _convert(text, ("json", *key), fields, _array_rows(path))
    return TaskFile(text, path)


def _convert_dataset(text: str, folder: Path, split: str, fields: FieldMap) -> TaskFile:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    content = [(str(path.relative_to(folder)), *(_size_and_time(path))) for path in files]
    key = ("folder", str(folder.resolve()), split, content)
    return _convert(text, key, fields, _folder_rows(folder, split, fields.columns))


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _convert(text: str, key: tuple[Any, ...], fields: FieldMap, rows: Iterable[Any]) -> TaskFile:
    """Write the rows to the cache folder, unless they are there. Nothing is read of `rows` before that is known."""
    name = f"{Path(text).name.replace(':', '-')}.jsonl"
    path = index.cache_folder() / index.name_in_cache((VERSION, key, fields.columns), name)
    if path.is_file():
        return TaskFile(text, path)
    index.make_cache_folder()
    with index.exclusive(path):
        if not path.is_file():
            log.info("converting %s to %s", text, path)
            with atomic_file.replacing(path) as file:
                for number, row in enumerate(rows, 1):
                    file.write(_json_line(f"{text}:{number}", row))
    return TaskFile(text, path)


def _json_line(place: str, row: Any) -> bytes:
    try:
        return json.dumps(row, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError):
        name, value = next((name, value) for name, value in row.items() if not _is_json(value))
        expected = "text, numbers, true, false, null, lists or structures of them"
        kind, shown = type(value).__name__, shorten(repr(value), _FOUND_CHARACTERS)
        raise ConfigError(f"{place}: field {name}: expected {expected}, found {kind} {shown}") from None


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _array_rows(path: Path) -> Iterator[Any]:
    data = path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    try:
        yield from strict_json.loads(data.decode())
    except UnicodeDecodeError as error:
        line, start = data.count(b"\n", 0, error.start) + 1, data.rfind(b"\n", 0, error.start)
        found = f"byte 0x{data[error.start]:02x} at column {error.start - start}"
        raise ConfigError(f"{path}:{line}: expected UTF-8, found {found}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: expected a JSON array, found invalid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # not of the standard, or a nesting beyond Python's limit
        raise ConfigError(f"{path}: expected a JSON array, found invalid JSON: {error}") from None


def _present(source: object, columns: tuple[str, ...], found: Collection[str]) -> list[str]:
    """The columns that are read of those found. Raises ConfigError if it is none."""
    present = [name for name in columns if name in found]
    if not present:
        raise ConfigError(
            f"{source} has the columns {', '.join(found) or '(none)'}, but none of {', '.join(columns)}; set "
            "tasks.source to its format, or name its columns in tasks.fields"
        )
    return present


def _without_nan(row: dict[str, Any]) -> dict[str, Any]:
    """The row with None for NaN, by which pandas writes that a number is missing."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def _parquet_rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} needs the package pyarrow; {_INSTALL}") from None
    with parquet.ParquetFile(path) as file:
        present = _present(path, columns, file.schema_arrow.names)
        for batch in file.iter_batches(_BATCH_ROWS, columns=present):
            yield from map(_without_nan, batch.to_pylist())


def _folder_rows(folder: Path, split: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Rows of what `save_to_disk` wrote, or of a folder of data files as the hub has them."""
    datasets = _import_datasets(folder)
    saved = [name for name in ("dataset_dict.json", "state.json") if (folder / name).is_file()]
    if not saved:
        if not split:
            raise ConfigError(f"{folder} is a folder of data files; name its split, such as {folder}:train")
        yield from _hub_rows(str(folder), split, columns)
        return
    dataset = datasets.load_from_disk(str(folder))
    if isinstance(dataset, datasets.DatasetDict):
        if split not in dataset:
            chosen = f"no split {split}" if split else "several splits"
            raise ConfigError(f"{folder} has {chosen}; name one, such as {folder}:{next(iter(dataset))}")
        dataset = dataset[split]
    elif split and split != str(dataset.split):
        raise ConfigError(f"{folder} has no splits; leave :{split} out")
    present = _present(folder, columns, dataset.column_names)
    for batch in dataset.select_columns(present).iter(_BATCH_ROWS):
        for values in zip(*batch.values(), strict=True):
            yield _without_nan(dict(zip(batch, values, strict=True)))


def _hub_rows(name: str, split: str, columns: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    datasets = _import_datasets(name)
    for row in datasets.load_dataset(name, split=split, streaming=True):
        yield _without_nan({column: row[column] for column in _present(name, columns, row)})


def _import_datasets(name: object) -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"{name} needs the package datasets; {_INSTALL}") from None
    return datasets
