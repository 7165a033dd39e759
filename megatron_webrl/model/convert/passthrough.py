"""Tensors of a Hugging Face folder that no Megatron parameter holds: heads of the released model that are not trained.

A checkpoint keeps them in its folder `passthrough`, in the format of a Hugging Face folder, and an export writes them
back. The architecture names them (`PASSTHROUGH_PREFIXES` in architectures.py); other unknown tensors are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_webrl.model.architectures import PASSTHROUGH_PREFIXES, is_passthrough
from megatron_webrl.model.convert.hf_files import (
    HFTensor,
    LoadError,
    TensorSpec,
    bitwise_equal,
    open_tensors,
    write_hf_model,
)
from megatron_webrl.util import atomic_file

PASSTHROUGH_FOLDER = "passthrough"
PART_ELEMENTS = 2**24  # read, converted or compared at a time
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


def read_parts(tensor: HFTensor, dtype: torch.dtype | None) -> Iterator[torch.Tensor]:
    """Contiguous parts of a tensor in order, converted to `dtype` if it is given. The shape alone decides the parts."""
    if not tensor.shape:
        yield tensor[...] if dtype is None else tensor[...].to(dtype)
        return
    rows = max(1, PART_ELEMENTS // max(1, torch.Size(tensor.shape[1:]).numel()))
    for start in range(0, tensor.shape[0], rows):
        part = tensor[start : start + rows]
        yield part if dtype is None else part.to(dtype)


def write_passthrough(
    tensors: Mapping[str, HFTensor], checkpoint: Path, dtype: torch.dtype | None, advance: Callable[[int], object]
) -> None:
    """Write the tensors beside a checkpoint's weights, flushed to disk; without tensors there is no folder."""
    if not tensors:
        return
    folder = checkpoint / PASSTHROUGH_FOLDER
    folder.mkdir()

    def parts(spec: TensorSpec) -> Iterator[torch.Tensor]:
        for part in read_parts(tensors[spec.name], dtype):
            yield part
            advance(part.nbytes)

    write_hf_model(folder, passthrough_specs(tensors, dtype), parts, SHARD_BYTES)
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
        write_passthrough(kept, checkpoint, None, lambda done: None)


def compare_passthrough(
    original: Mapping[str, HFTensor],
    copies: Mapping[str, HFTensor],
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    """Raise LoadError unless the copies equal the original tensors bit for bit, converted to `dtype`."""
    for name in sorted(original.keys() ^ copies.keys()):
        tensor = original.get(name) or copies[name]
        raise LoadError(f"tensor {name} of {tensor.path} has no counterpart")
    for name, tensor in original.items():
        copy = copies[name]
        parts = zip(read_parts(tensor, dtype), read_parts(copy, None), strict=False)
        if copy.shape != tensor.shape or not all(bitwise_equal(*pair) for pair in parts):
            raise LoadError(f"tensor {name} of {tensor.path} differs from its copy {copy.path}")
        advance(torch.Size(tensor.shape).numel() * copy.dtype.itemsize)
