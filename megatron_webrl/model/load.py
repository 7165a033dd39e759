"""Fill a model from a Hugging Face checkpoint, reading only this rank's slices."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron.core.utils import get_pg_rank, get_pg_size
from safetensors import SafetensorError, safe_open

from megatron_webrl.model.parameter_map import Entry, to_megatron
from megatron_webrl.model.qwen3_vl import Qwen3VL

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class LoadError(ValueError):
    """The folder's tensors are not exactly those of the model. Names the tensor and its file."""


def load_hf(model: Qwen3VL, folder: str | Path) -> None:
    """Copy the folder's tensors into the model, converting to the model's type. One tensor in memory at a time.

    Everything is checked before the first weight changes: a tensor too many, one missing, or one of a wrong
    shape raises LoadError. Each rank reads for itself; nothing is communicated.
    """
    folder = Path(folder)
    rank, size = get_pg_rank(model.pg_collection.tp), get_pg_size(model.pg_collection.tp)
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        tensors = _open(folder, stack)
        _check(model.entries, tensors)
        for entry in model.entries:
            if entry.parameter in parameters:
                file, _ = tensors[entry.name]
                to_megatron(entry, file.get_slice(entry.name), parameters[entry.parameter], rank, size)


def verify(entries: Sequence[Entry], folder: str | Path) -> None:
    """Check a folder's tensors against the table without reading them. Raises LoadError."""
    with ExitStack() as stack:
        _check(entries, _open(Path(folder), stack))


def _open(folder: Path, stack: ExitStack) -> dict[str, tuple[Any, Path]]:
    """Name -> (open file, its path) of every tensor in the folder."""
    tensors: dict[str, tuple[Any, Path]] = {}
    for path, expected in _files(folder).items():
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise LoadError(f"{path} is not a readable safetensors file: {error}") from error
        names = set(file.keys())
        if expected is not None and names != expected:
            name = min(names ^ expected)
            where = "is in the index but not in the file" if name in expected else "is in the file but not in the index"
            raise LoadError(f"tensor {name} of {path} {where}")
        tensors |= dict.fromkeys(names, (file, path))
    return tensors


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The checkpoint's files, each with the tensors that the index promises, None without an index."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            raise LoadError(f"{folder} holds neither {SINGLE} nor {INDEX}")
        return {folder / SINGLE: None}
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError) as error:
        raise LoadError(f"{index} is not an index of safetensors files: {error!r}") from error
    files: dict[Path, set[str] | None] = {}
    for file in sorted(set(weight_map.values())):
        files[folder / file] = {name for name, its in weight_map.items() if its == file}
    return files


def _check(entries: Sequence[Entry], tensors: dict[str, tuple[Any, Path]]) -> None:
    """Refuse anything but exactly the model's tensors."""
    known = {entry.name: entry for entry in entries}
    places = ", ".join(sorted({str(path) for _, path in tensors.values()})) or "no file"
    for name, (_, path) in sorted(tensors.items()):
        if name not in known:
            hint = " (its embeddings are tied)" if name == "lm_head.weight" else ""
            raise LoadError(f"tensor {name} of {path} is unexpected: the model of config.json has no such tensor{hint}")
    for name, entry in known.items():
        if name not in tensors:
            raise LoadError(f"tensor {name} {list(entry.shape)} is missing from {places}")
        file, path = tensors[name]
        found = tuple(file.get_slice(name).get_shape())
        if found != entry.shape:
            raise LoadError(f"tensor {name} of {path} has shape {list(found)}, expected {list(entry.shape)}")
