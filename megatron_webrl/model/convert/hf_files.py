"""Tensors of a Hugging Face folder: found through the index, checked against a configuration, read lazily."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_webrl.model.convert.background_writer import BackgroundWriter, create_file, sync_and_close
from megatron_webrl.model.parameter_map import ExpertFormat, ParameterMapping, parameter_mappings

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
OUTPUT_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "model.language_model.embed_tokens.weight"
COMPARE_CHUNK_ROWS = 4096  # at once, so that comparing needs little memory
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LoadError(ValueError):
    """Tensors that are not exactly those of the model. Names the tensor and its file."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor in its file. Nothing is read before it is sliced; a slice is a view of the mapped file."""

    name: str
    path: Path
    shape: tuple[int, ...]
    stored_dtype: str  # type as the file names it: "BF16"
    lazy_slice: Any

    def __getitem__(self, index: Any) -> torch.Tensor:
        found: torch.Tensor = self.lazy_slice[index]
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Raises LoadError for a type that weights do not have here."""
        if self.stored_dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise LoadError(f"tensor {self.name} of {self.path} has type {self.stored_dtype}; only {known} are read")
        return DTYPES[self.stored_dtype]


@dataclass(frozen=True)
class HFModel:
    """A folder whose tensors are exactly those of `entries`."""

    mappings: tuple[ParameterMapping, ...]
    tensors: dict[str, HFTensor]


@contextmanager
def open_hf_model(folder: str | Path, hf_config: Any) -> Iterator[HFModel]:
    """The folder's tensors, laid out as its files have them, after a check against the configuration.

    A tensor too many, one missing, one of a wrong shape, or a file that is cut short raises LoadError. Tied models
    may also hold an output layer if it equals the embedding bit for bit; it is left out.
    """
    with ExitStack() as stack:
        tensors = _open(Path(folder), stack)
        entries = parameter_mappings(hf_config, detect_expert_format(hf_config, tensors))
        if hf_config.tie_word_embeddings and OUTPUT_WEIGHT in tensors:
            _check_tied(tensors, entries)
            del tensors[OUTPUT_WEIGHT]
        _check(entries, tensors)
        yield HFModel(entries, tensors)


def detect_expert_format(hf_config: Any, tensors: dict[str, HFTensor]) -> ExpertFormat:
    """How the folder stores experts, by names and shapes; "released" for a dense model.

    With hidden size H and expert size I, a gate_up tensor tells [H, 2I] from [2I, H] unless H = 2I, and a down tensor
    [I, H] from [H, I] unless H = I. One of the two always can. Shapes of neither form count as released, for the
    check to name.
    """
    text = hf_config.text_config
    hidden, inner = text.hidden_size, getattr(text, "moe_intermediate_size", 0)
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            continue
        if name.endswith("_proj.weight"):
            return "separate"
        rows = hidden if name.endswith("gate_up_proj") else inner
        columns = 2 * inner if name.endswith("gate_up_proj") else hidden
        if rows != columns and tensor.shape[1:] in ((rows, columns), (columns, rows)):
            return "released" if tensor.shape[1:] == (rows, columns) else "transposed"
    return "released"


def bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors with contiguous rows hold the same bits: NaN equals itself, 0 is not -0."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def _open(folder: Path, stack: ExitStack) -> dict[str, HFTensor]:
    tensors: dict[str, HFTensor] = {}
    for path, expected in _files(folder).items():
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
        except (OSError, SafetensorError) as error:
            raise LoadError(_unreadable(path, error)) from error
        names = set(file.keys())
        if expected is not None and names != expected:
            name = min(names ^ expected)
            where = "is in the index but not in the file" if name in expected else "is in the file but not in the index"
            raise LoadError(f"tensor {name} of {path} {where}")
        for name in sorted(names):
            lazy = file.get_slice(name)
            tensors[name] = HFTensor(name, path, tuple(lazy.get_shape()), lazy.get_dtype(), lazy)
    return tensors


def _unreadable(path: Path, error: Exception) -> str:
    """What is wrong with a file; of one that is cut short also the first tensor that is not whole."""
    plain = f"{path} is not a readable safetensors file: {str(error).splitlines()[0]}"
    try:
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size - 8 - header
            content = json.loads(file.read(header)) if size >= 0 else {}
        ends = sorted((value["data_offsets"][1], name) for name, value in content.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return plain
    cut = next(((end, name) for end, name in ends if end > size), None)
    if cut is None:
        return plain
    return f"tensor {cut[1]} of {path} is cut short: it ends at byte {cut[0]} of the data, the file after {size}"


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The checkpoint's files, each with the tensors that the index promises, None without an index."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise LoadError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return {folder / SINGLE_FILE: None}
    try:
        weight_map = json.loads(index.read_text())["weight_map"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is not an index of safetensors files: {error!r}") from error
    files: dict[Path, set[str] | None] = {}
    for name, file in weight_map:
        names = files.setdefault(folder / str(file), set())
        assert names is not None
        names.add(name)
    return dict(sorted(files.items()))


def _check(entries: Sequence[ParameterMapping], tensors: dict[str, HFTensor]) -> None:
    """Refuse anything but exactly the model's tensors."""
    known = {entry.hf_param: entry.tensor_shape for entry in entries}
    places = ", ".join(sorted({str(tensor.path) for tensor in tensors.values()})) or "no file"
    for name, tensor in sorted(tensors.items()):
        if name not in known:
            raise LoadError(
                f"tensor {name} of {tensor.path} is unexpected: the model of config.json has no such tensor"
            )
    for name, shape in known.items():
        if name not in tensors:
            raise LoadError(f"tensor {name} {list(shape)} is missing from {places}")
        found = tensors[name]
        if found.shape != shape:
            raise LoadError(f"tensor {name} of {found.path} has shape {list(found.shape)}, expected {list(shape)}")


def _check_tied(tensors: dict[str, HFTensor], entries: Sequence[ParameterMapping]) -> None:
    """Refuse an output layer that differs from the embedding of a tied model."""
    output, embedding = tensors[OUTPUT_WEIGHT], tensors.get(EMBEDDING_WEIGHT)
    if embedding is None:
        shape = next(entry.tensor_shape for entry in entries if entry.hf_param == EMBEDDING_WEIGHT)
        raise LoadError(f"tensor {EMBEDDING_WEIGHT} {list(shape)} is missing from {output.path}")
    same = output.shape == embedding.shape and output.dtype == embedding.dtype
    for start in range(0, output.shape[0] if same else 0, COMPARE_CHUNK_ROWS):
        rows = slice(start, start + COMPARE_CHUNK_ROWS)
        same = same and bitwise_equal(output[rows], embedding[rows])
    if not same:
        raise LoadError(
            f"tensor {OUTPUT_WEIGHT} of {output.path} differs from {EMBEDDING_WEIGHT} of {embedding.path}, "
            "but config.json ties the two (tie_word_embeddings)"
        )


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_hf_model(
    folder: Path,
    specs: Sequence[TensorSpec],
    read_parts: Callable[[TensorSpec], Iterable[torch.Tensor]],
    shard_bytes: int,
) -> None:
    """Write the tensors into safetensors files of at most `limit` bytes each, with an index if there are several.

    A larger tensor has a file alone. `parts` gives a tensor's contents in order, one contiguous part at a time, each
    good until the next but one: it is written in a thread. Every file is brought to the disk.
    """
    shards = _shards(specs, shard_bytes)
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    with ExitStack() as files, BackgroundWriter() as behind:
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_FILE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= dict.fromkeys((spec.name for spec in shard), name)
            # Larger elements first: every tensor then begins at a multiple of its element size.
            shard.sort(key=lambda spec: -spec.dtype.itemsize)
            file = files.enter_context(create_file(folder / name))
            behind.submit(file.write, _header(shard))
            for spec in shard:
                for part in read_parts(spec):
                    behind.submit(file.write, part.reshape(-1).view(torch.uint8).numpy().data)
            behind.submit(sync_and_close, file)
    if not single:
        total = sum(spec.nbytes for spec in specs)
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(content, indent=2) + "\n")


def _shards(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards


def _header(specs: Sequence[TensorSpec]) -> bytes:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        offsets = [offset, offset + spec.nbytes]
        content[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for aligned data
    return len(text).to_bytes(8, "little") + text
