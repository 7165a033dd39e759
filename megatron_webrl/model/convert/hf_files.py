"""Read and write the tensors of a Hugging Face folder: located by its index, checked against its config, lazy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_webrl.model.architectures import is_passthrough, parameter_mappings
from megatron_webrl.model.convert.background_writer import BackgroundWriter, create_file, sync_and_close
from megatron_webrl.model.parameter_map import ExpertFormat, ParameterMapping
from megatron_webrl.util.text import first_line

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
OUTPUT_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "model.language_model.embed_tokens.weight"
COMPARE_CHUNK_ROWS = 4096  # compared at a time, to bound memory
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class LoadError(ValueError):
    """Stored tensors do not match the model. The message names the tensor and its file."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor in its file, read lazily: a slice is a view of the mapped file."""

    name: str
    path: Path
    shape: tuple[int, ...]
    stored_dtype: str  # as the file names it: "BF16"
    lazy_slice: Any

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.lazy_slice[index]
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype. Raises LoadError for an unsupported one."""
        if self.stored_dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise LoadError(f"tensor {self.name} of {self.path} has type {self.stored_dtype}; only {known} are read")
        return DTYPES[self.stored_dtype]


@dataclass(frozen=True)
class HFModel:
    """A folder whose tensors are exactly those of the mappings, and those that the architecture passes through."""

    mappings: tuple[ParameterMapping, ...]
    tensors: dict[str, HFTensor]
    passthrough: dict[str, HFTensor]  # have no parameter, see passthrough.py


@contextmanager
def open_hf_model(folder: str | Path, hf_config: Any) -> Iterator[HFModel]:
    """Open the folder's tensors, in their stored format. Raises LoadError if they do not match the config.

    A tied model may also store an output layer if it equals the embedding bit for bit; it is left out.
    """
    with open_tensors(Path(folder)) as tensors:
        passthrough = {name: tensors[name] for name in tensors if is_passthrough(hf_config.model_type, name)}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in passthrough}
        mappings = parameter_mappings(hf_config, detect_expert_format(hf_config, tensors))
        if hf_config.tie_word_embeddings and OUTPUT_WEIGHT in tensors:
            _check_tied(tensors, mappings)
            del tensors[OUTPUT_WEIGHT]
        _check(mappings, tensors)
        yield HFModel(mappings, tensors, passthrough)


def detect_expert_format(hf_config: Any, tensors: dict[str, HFTensor]) -> ExpertFormat:
    """Detect how the folder stores experts from names and shapes; "released" for a dense model.

    With hidden size H and expert size I, gate_up distinguishes [H, 2I] from [2I, H] unless H = 2I, and down [I, H] from
    [H, I] unless H = I; both cannot be ambiguous. Other shapes count as released, and the later check reports them.
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


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, HFTensor]]:
    """Open all tensors of a folder. Raises LoadError for unreadable files and an index that does not match them."""
    tensors: dict[str, HFTensor] = {}
    with ExitStack() as stack:
        for path, expected in _files(folder).items():
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise LoadError(_unreadable(path, error)) from error
            names = set(file.keys())
            if expected is not None and names != expected:
                name = min(names ^ expected)
                found = "in the index but not in the file" if name in expected else "in the file but not in the index"
                raise LoadError(f"tensor {name} of {path} is {found}")
            for name in sorted(names):
                lazy = file.get_slice(name)
                tensors[name] = HFTensor(name, path, tuple(lazy.get_shape()), lazy.get_dtype(), lazy)
        yield tensors


def _unreadable(path: Path, error: Exception) -> str:
    """Error message for an unreadable file; names the first incomplete tensor of a truncated one."""
    plain = f"{path} is not a readable safetensors file: {first_line(error)}"
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
    """Files of the folder, each with the tensor names listed in the index; None without an index."""
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


def _check(mappings: Sequence[ParameterMapping], tensors: dict[str, HFTensor]) -> None:
    """Raise LoadError unless the tensors are exactly those of the model."""
    known = {mapping.hf_param: mapping.tensor_shape for mapping in mappings}
    files = ", ".join(sorted({str(tensor.path) for tensor in tensors.values()})) or "no file"
    for key, tensor in sorted(tensors.items()):
        if key not in known:
            raise LoadError(f"tensor {key} of {tensor.path} is unexpected: the model of config.json has no such tensor")
    for key, shape in known.items():
        if key not in tensors:
            raise LoadError(f"tensor {key} {list(shape)} is missing from {files}")
        tensor = tensors[key]
        if tensor.shape != shape:
            raise LoadError(f"tensor {key} of {tensor.path} has shape {list(tensor.shape)}, expected {list(shape)}")


def _check_tied(tensors: dict[str, HFTensor], mappings: Sequence[ParameterMapping]) -> None:
    """Raise LoadError if the output layer of a tied model differs from the embedding."""
    output, embedding = tensors[OUTPUT_WEIGHT], tensors.get(EMBEDDING_WEIGHT)
    if embedding is None:
        shape = next(mapping.tensor_shape for mapping in mappings if mapping.hf_param == EMBEDDING_WEIGHT)
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
    """Name, shape and dtype of a tensor to write."""

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
    """Write tensors into safetensors files of at most `shard_bytes` or one tensor, with an index if there are several.

    `read_parts` yields a tensor's contiguous parts in order, each valid until the next but one: a thread writes them.
    """
    shards = _shards(specs, shard_bytes)
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    with ExitStack() as files, BackgroundWriter() as writer:
        for number, shard in enumerate(shards, start=1):
            name = SINGLE_FILE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= dict.fromkeys((spec.name for spec in shard), name)
            shard.sort(key=lambda spec: -spec.dtype.itemsize)  # aligns every tensor to its element size
            file = files.enter_context(create_file(folder / name))
            writer.submit(file.write, _header(shard))
            for spec in shard:
                for part in read_parts(spec):
                    writer.submit(file.write, part.reshape(-1).view(torch.uint8).numpy().data)
            writer.submit(sync_and_close, file)
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
    text += b" " * (-len(text) % 8)  # the format requires aligned data
    return len(text).to_bytes(8, "little") + text
