"""Read and write Megatron's distributed checkpoints ("torch_dist") chunk by chunk, without process groups or a model.

Megatron stores one tensor [layers, ...] for all layers of a dense model, under a key without a layer number, but one
tensor per layer if layers are of several kinds. All experts of a layer are one tensor.

The format is that of torch.distributed.checkpoint: `.metadata` lists each tensor's chunks and their positions in the
`.distcp` files, each in the format of `torch.save`. The writer of torch keeps the last tensor of every key until the
file is complete, up to a whole model; here chunks are mapped and written one by one.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from megatron_webrl.model.convert.atomic_folder import BackgroundWriter, create_file, sync_and_close
from megatron_webrl.model.convert.hf_files import LoadError
from megatron_webrl.model.parameter_map import (
    EXPERT_INFIX,
    LAYER_PREFIX,
    ParameterMapping,
    ShardRange,
    is_linear_attention,
    is_sparse,
    padded_vocab_size,
    shard_ranges,
)
from megatron_webrl.util.text import first_line

MODEL_KEY_PREFIXES = ("decoder.", "embedding.", "output_layer.", "visual.")  # a trainer's checkpoint holds others
UNSTACKED_LAYER_KEY = "decoder.layers.0.input_layernorm.weight"


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


@dataclass(frozen=True)
class ShardedChunk:
    """A rank's chunk of a parameter: its position in the whole parameter and its sources."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    sources: tuple[tuple[ParameterMapping, ShardRange, tuple[slice, ...]], ...]  # slices into the chunk


def sharded_chunks(mappings: Sequence[ParameterMapping], rank: int, size: int) -> list[ShardedChunk]:
    """Chunks that rank `rank` of `size` holds of the parameter that the mappings fill together.

    Gate and up are separate chunks, as in Megatron. Raises ValueError if `size` does not divide the parameter.
    """
    kind = mappings[0].layout.kind
    groups = [[mapping] for mapping in mappings] if kind == "gate_up" else [list(mappings)]
    return [_chunk(group, rank, size) for group in groups]


def _chunk(mappings: Sequence[ParameterMapping], rank: int, size: int) -> ShardedChunk:
    first, kind = mappings[0], mappings[0].layout.kind
    ranges = [(mapping, piece) for mapping in mappings for piece in shard_ranges(mapping, rank, size)]
    dim = 1 if kind == "row" else 0
    length = sum(piece.length for _, piece in ranges)
    if kind == "vocabulary":
        length = padded_vocab_size(first.shape[0], size) // size
    base = first.layout.gate_up_index * length if kind == "gate_up" else 0
    start = 0 if kind == "replicated" else rank * length
    start += first.layout.gate_up_index * first.shape[0] if kind == "gate_up" else 0
    sources = []
    for mapping, piece in ranges:
        low = piece.shard_offset - base
        sources.append((mapping, piece, (*[slice(None)] * dim, slice(low, low + piece.length))))
    shape = (*first.shape[:dim], length, *first.shape[dim + 1 :])
    return ShardedChunk(tuple(start if axis == dim else 0 for axis in range(len(shape))), shape, tuple(sources))


METADATA_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
ALIGNMENT_BYTES = 64  # as torch.save aligns contents within its output


@dataclass(frozen=True)
class Box:
    """A rectangular region of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def intersection(self, other: Box) -> Box | None:
        """Intersection of two boxes; None if it is empty."""
        starts = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(pair) for pair in zip(self.ends, other.ends, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(tuple(starts), sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor whose contents are the box `outer`."""
        ranges = zip(self.offsets, outer.offsets, self.sizes, strict=True)
        return tuple(slice(offset - start, offset - start + size) for offset, start, size in ranges)


@dataclass(frozen=True)
class StoredChunk:
    """A chunk of a stored tensor; offset and length in its file are bytes."""

    key: str
    box: Box
    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint. `chunks`: keyed by first offset if all have size 1 in axis 0, else all under -1."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: dict[int, tuple[StoredChunk, ...]]

    def overlapping(self, box: Box) -> list[StoredChunk]:
        """Chunks that intersect a box."""
        rows = range(box.offsets[0], box.ends[0]) if -1 not in self.chunks else (-1,)
        return [chunk for row in rows for chunk in self.chunks.get(row, ()) if chunk.box.intersection(box)]


class DistCheckpointReader(AbstractContextManager["DistCheckpointReader"]):
    """Tensors of a checkpoint. Raises LoadError for a folder without one and for missing or truncated files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, BinaryIO] = {}
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise LoadError(f"{folder / '.metadata'} describes no distributed checkpoint: {error}") from error
        self._ends: dict[Path, int] = {}  # least size of each file in bytes
        for place in metadata.storage_data.values():
            path = folder / place.relative_path
            self._ends[path] = max(self._ends.get(path, 0), place.offset + place.length)
        self.tensors = {
            key: self._stored(key, value, metadata.storage_data)
            for key, value in metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def check_coverage(self, key: str) -> None:
        """Raise LoadError unless a tensor's chunks cover it exactly once and are within their files."""
        stored = self.tensors[key]
        chunks = [chunk for row in stored.chunks.values() for chunk in row]
        covered = sum(torch.Size(chunk.box.sizes).numel() for chunk in chunks)
        if covered != torch.Size(stored.shape).numel():
            raise LoadError(f"tensor {key} of {self.folder} is not covered once by its chunks ({covered} elements)")
        for path in {chunk.path for chunk in chunks}:
            end = self._ends[path]
            size = path.stat().st_size if path.is_file() else None
            if size is None or size < end:
                found = "is missing" if size is None else f"is cut short: it ends at byte {size}, not {end} or later"
                raise LoadError(f"tensor {key}: its file {path} {found}")

    def read_chunk(self, chunk: StoredChunk) -> torch.Tensor:
        """A chunk in the shape of its box: a view of the mapped file, possibly unaligned (see `ensure_aligned`)."""
        if chunk.path not in self._files:
            self._files[chunk.path] = chunk.path.open("rb")
        try:
            memory = _mapped(self._files[chunk.path], chunk.offset, chunk.length)
            file = cast(IO[bytes], _MemoryFile(memory.numpy().data))
            form = torch.load(file, map_location="meta", weights_only=True)  # reads no contents, records their offset
            if not isinstance(form, torch.Tensor):
                raise LoadError(f"tensor {chunk.key} of {chunk.path} is not a tensor")
            storage: Any = form.untyped_storage()
            start = storage._checkpoint_offset
            contents = torch.frombuffer(memory[start : start + storage.nbytes()].numpy(), dtype=form.dtype)
            tensor = contents.as_strided(form.shape, form.stride(), form.storage_offset())
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise LoadError(f"tensor {chunk.key} of {chunk.path} cannot be read: {first_line(error)}") from error
        if form.numel() != torch.Size(chunk.box.sizes).numel() or form.dtype != self.tensors[chunk.key].dtype:
            raise LoadError(f"tensor {chunk.key} of {chunk.path} does not match .metadata")
        return tensor.reshape(chunk.box.sizes)  # Megatron may omit the axes of layers and experts, of size 1

    def _stored(
        self, key: str, value: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]
    ) -> StoredTensor:
        found = []
        for each in value.chunks:
            place = places.get(MetadataIndex(key, each.offsets))
            if place is None:
                raise LoadError(f"tensor {key} of {self.folder}: .metadata names no file for one of its chunks")
            box = Box(tuple(each.offsets), tuple(each.sizes))
            found.append(StoredChunk(key, box, self.folder / place.relative_path, place.offset, place.length))
        rows: dict[int, list[StoredChunk]] = {}
        thin = all(chunk.box.sizes and chunk.box.sizes[0] == 1 for chunk in found)
        for chunk in found:
            rows.setdefault(chunk.box.offsets[0] if thin else -1, []).append(chunk)
        return StoredTensor(tuple(value.size), value.properties.dtype, {row: tuple(part) for row, part in rows.items()})


class DistCheckpointWriter(AbstractContextManager["DistCheckpointWriter"]):
    """Write a checkpoint chunk by chunk in a thread; a later call raises its errors. Valid only after `finish`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._writer = BackgroundWriter()
        self._open: dict[str, BinaryIO] = {}  # used by the thread only, like `_written`
        self._items: dict[str, Any] = {}  # key -> its metadata
        self._written: list[WriteResult] = []

    def write_chunk(
        self, file: str, key: str, shape: Sequence[int], offsets: Sequence[int], tensor: torch.Tensor
    ) -> None:
        """Append a chunk; missing leading axes are 1. The tensor owns its storage, unchanged until the next call."""
        sizes = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
        item = self._items.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        )
        item.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        self._writer.submit(self._append, file, MetadataIndex(key, offsets), tensor.view(sizes))

    def write_object(self, file: str, key: str, value: Any) -> None:
        """Append an object in Megatron's format: a list of one rank's objects of the key."""
        self._items[key] = BytesStorageMetadata()
        self._writer.submit(self._append, file, MetadataIndex(key), [value])

    def close_files(self) -> None:
        """Flush all files to disk and close them; no more chunks can be added to them."""
        self._writer.submit(self._close)

    def __exit__(self, *error: Any) -> None:
        try:
            self._writer.__exit__(*error)
        finally:
            for file in self._open.values():
                file.close()

    def finish(self) -> None:
        """Write the metadata that Megatron needs to load the checkpoint."""
        self.close_files()
        self._writer.wait()
        FileSystemWriter(self.folder).finish(Metadata(self._items), [self._written])
        torch.save({}, self.folder / "common.pt")
        (self.folder / "metadata.json").write_text(json.dumps(METADATA_JSON))

    def _close(self) -> None:
        for file in self._open.values():
            sync_and_close(file)
        self._open.clear()

    def _append(self, file: str, index: MetadataIndex, value: Any) -> None:
        stream = self._open.get(file)
        if stream is None:
            stream = self._open[file] = create_file(self.folder / file)
        stream.write(bytes(-stream.tell() % ALIGNMENT_BYTES))
        start = stream.tell()
        with _no_checksums():
            torch.save(value, stream)
        place = _StorageInfo(file, start, stream.tell() - start)
        self._written.append(WriteResult(index=index, size_in_bytes=place.length, storage_data=place))


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """View of contiguous memory as a tensor with its own storage. `torch.save` writes whole storages."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(flat, dtype=tensor.dtype).view(tensor.shape)


def ensure_aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its address is not aligned to its element size, which torch needs for computation."""
    if tensor.data_ptr() % tensor.element_size() == 0:
        return tensor
    return tensor.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _mapped(file: BinaryIO, start: int, length: int) -> torch.Tensor:
    """Map bytes of a file for the lifetime of the tensor. Raises OSError if the file is too short."""
    if os.fstat(file.fileno()).st_size < start + length:
        raise OSError("its file is cut short")
    lead = start % mmap.ALLOCATIONGRANULARITY
    # Private and writable, since torch requires writable memory. Nothing is written, so nothing is copied.
    memory = mmap.mmap(file.fileno(), lead + length, access=mmap.ACCESS_COPY, offset=start - lead)
    return torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=lead)


class _MemoryFile(io.RawIOBase):
    """Read-only file object over a memory view."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._position = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._memory)}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        data = self._memory[self._position : self._position + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Disable checksums in torch.save: they take half its time, and no reader of checkpoints uses them."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
