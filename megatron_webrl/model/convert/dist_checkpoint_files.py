"""Megatron's distributed checkpoint ("torch_dist") as files: its tensors read and written chunk by chunk.

No process group is needed and no model. The format is that of torch.distributed.checkpoint: `.metadata` lists each
tensor's chunks and where in the `.distcp` files they lie, each as `torch.save` has it. Its own writer keeps the last
tensor of every key until the file is complete, up to a whole model; here chunks are mapped and written one by one.
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

from megatron_webrl.model.convert.background_writer import BackgroundWriter, create_file, sync_and_close
from megatron_webrl.model.convert.hf_files import LoadError

METADATA_JSON = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
ALIGNMENT_BYTES = 64  # bytes; torch.save aligns contents to this within what it writes


@dataclass(frozen=True)
class Box:
    """A box within a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def intersection(self, other: Box) -> Box | None:
        """What two boxes share, None if nothing."""
        starts = [max(pair) for pair in zip(self.offsets, other.offsets, strict=True)]
        ends = [min(pair) for pair in zip(self.ends, other.ends, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(tuple(starts), sizes) if all(size > 0 for size in sizes) else None

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds `outer`."""
        places = zip(self.offsets, outer.offsets, self.sizes, strict=True)
        return tuple(slice(offset - start, offset - start + size) for offset, start, size in places)


@dataclass(frozen=True)
class StoredChunk:
    """A part of a stored tensor and its place in a file, in bytes."""

    key: str
    box: Box
    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint. `chunks`: by their first offset if each is one thick there, else all under -1."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: dict[int, tuple[StoredChunk, ...]]

    def overlapping(self, box: Box) -> list[StoredChunk]:
        """The chunks that hold some of a box."""
        rows = range(box.offsets[0], box.ends[0]) if -1 not in self.chunks else (-1,)
        return [chunk for row in rows for chunk in self.chunks.get(row, ()) if chunk.box.intersection(box)]


class DistCheckpointReader(AbstractContextManager["DistCheckpointReader"]):
    """The tensors of a checkpoint; a context manager that closes its files.

    Raises LoadError for a folder that holds no checkpoint, and for a file that is missing or cut short.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, BinaryIO] = {}
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise LoadError(f"{folder / '.metadata'} describes no distributed checkpoint: {error}") from error
        self._ends: dict[Path, int] = {}  # bytes that each file has at least
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
        """Check that a tensor's chunks cover it and that their files hold them. Raises LoadError."""
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
        """A whole chunk, in the shape of its box: a view of its file, which may lie there at any byte (`aligned`)."""
        if chunk.path not in self._files:
            self._files[chunk.path] = chunk.path.open("rb")
        try:
            memory = _mapped(self._files[chunk.path], chunk.offset, chunk.length)
            # On the meta device no contents are read; torch notes where they begin.
            file = cast(IO[bytes], _View(memory.numpy().data))
            form = torch.load(file, map_location="meta", weights_only=True)
            if not isinstance(form, torch.Tensor):
                raise LoadError(f"tensor {chunk.key} of {chunk.path} is no tensor")
            storage: Any = form.untyped_storage()
            start = storage._checkpoint_offset
            contents = torch.frombuffer(memory[start : start + storage.nbytes()].numpy(), dtype=form.dtype)
            tensor = contents.as_strided(form.shape, form.stride(), form.storage_offset())
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LoadError(f"tensor {chunk.key} of {chunk.path} cannot be read: {reason}") from error
        if form.numel() != torch.Size(chunk.box.sizes).numel() or form.dtype != self.tensors[chunk.key].dtype:
            raise LoadError(f"tensor {chunk.key} of {chunk.path} is not what .metadata says of it")
        # Megatron may leave out the axes of layers and experts, which are one thick.
        return tensor.reshape(chunk.box.sizes)

    def _stored(
        self, key: str, value: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]
    ) -> StoredTensor:
        found = []
        for each in value.chunks:
            place = places.get(MetadataIndex(key, each.offsets))
            if place is None:
                raise LoadError(f"tensor {key} of {self.folder}: .metadata names no file for a chunk of it")
            box = Box(tuple(each.offsets), tuple(each.sizes))
            found.append(StoredChunk(key, box, self.folder / place.relative_path, place.offset, place.length))
        rows: dict[int, list[StoredChunk]] = {}
        thin = all(chunk.box.sizes and chunk.box.sizes[0] == 1 for chunk in found)
        for chunk in found:
            rows.setdefault(chunk.box.offsets[0] if thin else -1, []).append(chunk)
        return StoredTensor(tuple(value.size), value.properties.dtype, {row: tuple(held) for row, held in rows.items()})


class DistCheckpointWriter(AbstractContextManager["DistCheckpointWriter"]):
    """Writes a checkpoint chunk by chunk into a folder. It is one only after `finish`.

    Chunks are written in a thread, one behind the caller; what fails there is raised by a later call.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._behind = BackgroundWriter()
        self._open: dict[str, BinaryIO] = {}  # of the thread, as is `_written`
        self._items: dict[str, Any] = {}  # key -> its metadata
        self._written: list[WriteResult] = []

    def write_chunk(
        self, file: str, key: str, shape: Sequence[int], offsets: Sequence[int], tensor: torch.Tensor
    ) -> None:
        """Append one chunk, which is all of its storage, to a file. Leading axes that it lacks are one thick.

        The tensor must stay as it is until the next call.
        """
        sizes = (1,) * (len(shape) - tensor.dim()) + tuple(tensor.shape)
        item = self._items.setdefault(
            key, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        )
        item.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        self._behind.submit(self._append, file, MetadataIndex(key, offsets), tensor.view(sizes))

    def write_object(self, file: str, key: str, value: Any) -> None:
        """Append an object in Megatron's form: the list of what one rank holds under the key."""
        self._items[key] = BytesStorageMetadata()
        self._behind.submit(self._append, file, MetadataIndex(key), [value])

    def close_files(self) -> None:
        """Bring all files to the disk; no chunk can be added to them any more."""
        self._behind.submit(self._close)

    def __exit__(self, *error: Any) -> None:
        try:
            self._behind.__exit__(*error)
        finally:
            for file in self._open.values():
                file.close()

    def finish(self) -> None:
        """Write what makes the files a checkpoint that Megatron loads."""
        self.close_files()
        self._behind.wait()
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
    """The same contiguous memory as a tensor whose storage it is. `torch.save` writes whole storages."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(flat, dtype=tensor.dtype).view(tensor.shape)


def ensure_aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if its elements do not begin where the processor wants them: torch may calculate with it."""
    if tensor.data_ptr() % tensor.element_size() == 0:
        return tensor
    return tensor.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _mapped(file: BinaryIO, start: int, length: int) -> torch.Tensor:
    """Bytes of a file, mapped while the tensor lives. Raises OSError if the file has fewer."""
    if os.fstat(file.fileno()).st_size < start + length:
        raise OSError("its file is cut short")
    lead = start % mmap.ALLOCATIONGRANULARITY
    # Private and writable, since torch wants memory that could be written to. Nothing is written, so nothing is copied.
    memory = mmap.mmap(file.fileno(), lead + length, access=mmap.ACCESS_COPY, offset=start - lead)
    return torch.frombuffer(memory, dtype=torch.uint8, count=length, offset=lead)


class _View(io.RawIOBase):
    """Memory as a file."""

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._place = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: len(self._memory)}[whence]
        self._place = start + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        found = self._memory[self._place : self._place + len(buffer)]
        buffer[: len(found)] = found
        self._place += len(found)
        return len(found)


@contextmanager
def _no_checksums() -> Iterator[None]:
    """Let torch.save leave out checksums, which take half its time and which nothing that reads checkpoints uses."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)
