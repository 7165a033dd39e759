"""Read and write Megatron's distributed checkpoints ("torch_dist") chunk by chunk, without process groups or a model.

Megatron stores one tensor [layers, ...] for all layers of a dense model, under a key without a layer number, but one
tensor per layer if layers are of several kinds. All experts of a layer are one tensor.

The format is that of torch.distributed.checkpoint: `.metadata` lists each tensor's chunks and their positions in the
`.distcp` files, each in the format of `torch.save`. The writer of torch keeps the last tensor of every key until the
file is complete, up to a whole model; here chunks are written one by one.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _create_file_view

from megatron_webrl.model.convert.checkpoint_folder import LoadError
from megatron_webrl.model.parameter_map import (
    EXPERT_INFIX,
    LAYER_PREFIX,
    ParameterMapping,
    is_linear_attention,
    is_sparse,
)
from megatron_webrl.util.text import first_line

MODEL_KEY_PREFIXES = ("decoder.", "embedding.", "output_layer.", "visual.")  # a trainer's checkpoint holds others
UNSTACKED_LAYER_KEY = "decoder.layers.0.input_layernorm.weight"
METADATA_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class TensorLocation:
    """Location of a parameter in the stored tensor `key`: its index in the leading axes (layer, expert)."""

    key: str
    leading_index: tuple[int, ...]
    leading_sizes: tuple[int, ...]

    @property
    def extra_state_key(self) -> str | None:
        """Key of the extra-state object that Megatron stores for a linear layer; None for other parameters."""
        module, _, name = self.key.removesuffix(".weight").rpartition(".")
        if not module.startswith("decoder.") or not name.startswith("linear_"):
            return None
        index, sizes = self.leading_index or (0,), self.leading_sizes or (1,)
        return f"{module}.{name}._extra_state/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, sizes))}"


def stacks_layers(text: Any) -> bool:
    """Whether Megatron stores all layers of the text model in one tensor."""
    layers = range(text.num_hidden_layers)
    return not any(is_sparse(text, layer) or is_linear_attention(text, layer) for layer in layers)


def tensor_location(mapping: ParameterMapping, text_config: Any, stacked: bool) -> TensorLocation:
    """Location of the mapping's parameter. `stacked`: whether layers are stacked."""
    key, index, sizes = mapping.megatron_param, [], []
    if mapping.layer is not None and stacked:
        key = LAYER_PREFIX.sub("decoder.layers.", key)
        index.append(mapping.layer)
        sizes.append(text_config.num_hidden_layers)
    if mapping.expert is not None:
        key = EXPERT_INFIX.sub(".experts.", key)
        index.append(mapping.expert)
        sizes.append(text_config.num_experts)
    return TensorLocation(key, tuple(index), tuple(sizes))


class DistCheckpointReader:
    """Tensors of a checkpoint. Raises LoadError for a folder without one and for damaged files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise LoadError(f"{folder / '.metadata'} describes no distributed checkpoint: {error}") from error
        self.places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data
        found = metadata.state_dict_metadata.items()
        self.tensors = {key: value for key, value in found if isinstance(value, TensorStorageMetadata)}

    def check_coverage(self, key: str) -> None:
        """Raise LoadError unless a tensor's chunks have as many elements as the tensor."""
        covered = sum(chunk.sizes.numel() for chunk in self.tensors[key].chunks)
        if covered != self.tensors[key].size.numel():
            raise LoadError(f"tensor {key} of {self.folder} is not covered once by its chunks ({covered} elements)")

    def read(self, where: TensorLocation, shape: Sequence[int]) -> Tensor:
        """A parameter of this shape, without padding."""
        stored = self.tensors[where.key]
        offsets = torch.Size((*where.leading_index, *(0 for _ in shape)))
        result = torch.empty((*(1 for _ in where.leading_index), *shape), dtype=stored.properties.dtype)
        wanted = [ChunkStorageMetadata(offsets, result.shape)]
        for item in create_read_items_for_chunk_list(where.key, stored, wanted):
            path = self.folder
            try:
                place = self.places[item.storage_index]
                path /= place.relative_path
                with path.open("rb") as file:
                    view: Any = _create_file_view(file, place.offset, place.length)
                    chunk = torch.load(view, weights_only=True)
                # Megatron may omit the axes of layers and experts, of size 1.
                chunk = chunk.reshape(stored.chunks[item.storage_index.index].sizes)  # type: ignore[index]
            except (RuntimeError, EOFError, OSError, KeyError, pickle.UnpicklingError) as error:
                raise LoadError(f"tensor {where.key} of {path} cannot be read: {first_line(error)}") from error
            part = narrow_tensor_by_index(result, item.dest_offsets, item.lengths)
            part.copy_(narrow_tensor_by_index(chunk, item.storage_offsets, item.lengths))
        return result.view(*shape)


class DistCheckpointWriter:
    """Write a checkpoint chunk by chunk. It is valid only after `finish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._items: dict[str, Any] = {}  # key -> its metadata
        self._written: list[WriteResult] = []

    def write_chunk(self, file: str, key: str, shape: Sequence[int], offsets: Sequence[int], chunk: Tensor) -> None:
        """Append a chunk of a tensor of this shape; missing leading axes are 1. The chunk owns its storage."""
        chunk = chunk.view((1,) * (len(shape) - chunk.dim()) + chunk.shape)
        item = self._items.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(shape), [])
        )
        item.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        self._append(file, MetadataIndex(key, offsets), chunk)

    def write_object(self, file: str, key: str, value: Any) -> None:
        """Append an object in Megatron's format: a list of one rank's objects of the key."""
        self._items[key] = BytesStorageMetadata()
        self._append(file, MetadataIndex(key), [value])

    def finish(self) -> None:
        """Write the metadata that Megatron needs to load the checkpoint."""
        FileSystemWriter(self.folder).finish(Metadata(self._items), [self._written])
        torch.save({}, self.folder / "common.pt")
        (self.folder / "metadata.json").write_text(json.dumps(METADATA_JSON))

    def _append(self, file: str, index: MetadataIndex, value: Any) -> None:
        with (self.folder / file).open("ab") as stream:
            start = stream.tell()
            torch.save(value, stream)
            place = _StorageInfo(file, start, stream.tell() - start)
        self._written.append(WriteResult(index=index, size_in_bytes=place.length, storage_data=place))
