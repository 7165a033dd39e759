"""Files of a Hugging Face checkpoint: metadata, reader, writer, tensors passed through.

Passed through are tensors that no Megatron parameter holds: heads of the released model that are not trained. A
checkpoint keeps them in its folder `passthrough`, in the format of a Hugging Face folder, and an export writes them
back. The architecture names them (`PASSTHROUGH_PREFIXES` in architectures.py); other unknown tensors are refused.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_webrl.model.architectures import PASSTHROUGH_PREFIXES, is_passthrough, parameter_mappings
from megatron_webrl.model.convert.checkpoint_folder import LoadError
from megatron_webrl.model.parameter_map import ExpertFormat, ParameterMapping
from megatron_webrl.util import atomic_file
from megatron_webrl.util.text import first_line

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


def metadata_files(folder: Path) -> list[Path]:
    """Non-weight files of the folder, sorted by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not any(path.match(pattern) for pattern in WEIGHT_PATTERNS)
    )


def copy_metadata(source: Path, target: Path) -> None:
    """Copy all files except weights to a folder, creating it if needed."""
    target.mkdir(parents=True, exist_ok=True)
    for path in metadata_files(source):
        shutil.copyfile(path, target / path.name)


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
OUTPUT_WEIGHT, EMBEDDING_WEIGHT = "lm_head.weight", "model.language_model.embed_tokens.weight"
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


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

    def read(self, dtype: torch.dtype | None) -> torch.Tensor:
        """The whole tensor, converted to `dtype` if it is given."""
        return self[...] if dtype is None else self[...].to(dtype)

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
    passthrough: dict[str, HFTensor]  # have no parameter


@contextmanager
def open_hf_model(folder: str | Path, hf_config: Any) -> Iterator[HFModel]:
    """Open the folder's tensors, in their stored format. Raises LoadError if they do not match the config.

    A tied model may also store an output layer if it equals the embedding bit for bit; it is left out.
    """
    with open_tensors(Path(folder)) as tensors:
        passthrough = {name: tensors[name] for name in tensors if is_passthrough(hf_config.model_type, name)}
        tensors = {name: tensor for name, tensor in tensors.items() if name not in passthrough}
        mappings = parameter_mappings(hf_config, detect_expert_format(hf_config, tensors))
        output = tensors.pop(OUTPUT_WEIGHT, None) if hf_config.tie_word_embeddings else None
        _check(mappings, tensors)
        if output is not None and not bitwise_equal(output[...], tensors[EMBEDDING_WEIGHT][...]):
            raise LoadError(
                f"tensor {OUTPUT_WEIGHT} of {output.path} differs from {EMBEDDING_WEIGHT} of "
                f"{tensors[EMBEDDING_WEIGHT].path}, but config.json ties the two (tie_word_embeddings)"
            )
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
    """Whether two tensors hold the same bits: NaN equals itself, 0 is not -0."""
    same = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@contextmanager
def open_tensors(folder: Path) -> Iterator[dict[str, HFTensor]]:
    """Open all tensors of a folder. Raises LoadError for unreadable files."""
    tensors: dict[str, HFTensor] = {}
    with ExitStack() as stack:
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise LoadError(f"{path} is not a readable safetensors file: {first_line(error)}") from error
            for name in sorted(file.keys()):
                lazy = file.get_slice(name)
                tensors[name] = HFTensor(name, path, tuple(lazy.get_shape()), lazy.get_dtype(), lazy)
        yield tensors


def _files(folder: Path) -> list[Path]:
    """Files of the folder with tensors."""
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise LoadError(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        return [folder / SINGLE_FILE]
    try:
        return sorted({folder / str(file) for file in json.loads(index.read_text())["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} is not an index of safetensors files: {error!r}") from error


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
    folder: Path, specs: Sequence[TensorSpec], read: Callable[[TensorSpec], torch.Tensor], shard_bytes: int
) -> None:
    """Write tensors into safetensors files of at most `shard_bytes` or one tensor, with an index if there are several.

    One tensor is in memory at a time, unlike with the writer of safetensors.
    """
    shards = _shards(specs, shard_bytes)
    single = len(shards) == 1
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = SINGLE_FILE if single else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys((spec.name for spec in shard), name)
        shard.sort(key=lambda spec: -spec.dtype.itemsize)  # aligns every tensor to its element size
        with (folder / name).open("xb") as file:
            file.write(_header(shard))
            for spec in shard:
                file.write(read(spec).reshape(-1).view(torch.uint8).numpy().data)
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


PASSTHROUGH_FOLDER = "passthrough"
SHARD_BYTES = 5 * 10**9


@contextmanager
def open_passthrough(checkpoint: Path, model_type: str) -> Iterator[dict[str, HFTensor]]:
    """Open the passthrough tensors that a checkpoint keeps, if any. Raises LoadError for others among them."""
    folder = checkpoint / PASSTHROUGH_FOLDER
    if not folder.is_dir():
        yield {}
        return
    with open_tensors(folder) as tensors:
        for name, tensor in tensors.items():
            if not is_passthrough(model_type, name):
                raise LoadError(f"tensor {name} of {tensor.path} is unexpected: {model_type} has no such tensor")
        yield tensors


def passthrough_specs(tensors: Mapping[str, HFTensor], dtype: torch.dtype | None) -> list[TensorSpec]:
    """Specs of the tensors, converted to `dtype` if it is given. Raises LoadError for an unsupported dtype."""
    return [TensorSpec(name, tensor.shape, dtype or tensor.dtype) for name, tensor in tensors.items()]


def write_passthrough(tensors: Mapping[str, HFTensor], checkpoint: Path, dtype: torch.dtype | None) -> None:
    """Write the tensors beside a checkpoint's weights, flushed to disk; without tensors there is no folder."""
    if not tensors:
        return
    folder = checkpoint / PASSTHROUGH_FOLDER
    folder.mkdir()
    specs = passthrough_specs(tensors, dtype)
    write_hf_model(folder, specs, lambda spec: tensors[spec.name].read(spec.dtype), SHARD_BYTES)
    atomic_file.fsync_tree(folder)


def copy_passthrough(model: Path, checkpoint: Path, newest: Path | None) -> None:
    """Copy the passthrough tensors of a model folder to a checkpoint of its training.

    A folder without weights has those of `newest`, the run's newest checkpoint; without one, those of its parent, as a
    checkpoint's `hf`. Raises LoadError and OSError.
    """
    model_type = json.loads((model / "config.json").read_text()).get("model_type", "")
    if model_type not in PASSTHROUGH_PREFIXES:
        return
    own = any(model.glob("*.safetensors"))
    source = newest or model.absolute().parent
    with open_tensors(model) if own else open_passthrough(source, model_type) as tensors:
        kept = {name: tensor for name, tensor in tensors.items() if is_passthrough(model_type, name)}
        write_passthrough(kept, checkpoint, None)
