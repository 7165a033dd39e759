"""Conversion between Hugging Face folders and Megatron's distributed checkpoints, one part of a tensor at a time.

    OUT/megatron/  the weights, as `dist_files` has them
    OUT/hf/        everything of the Hugging Face folder but weights

A checkpoint holds each parameter as one tensor, in the shape that it has without any splitting (the vocabulary may be
padded), cut into a chunk for each rank. It loads at any parallel sizes whatever they were when it was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model.convert import hf_metadata as folders
from megatron_webrl.model.convert.atomic_folder import atomic_folder, check_free_space
from megatron_webrl.model.convert.checkpoint_layout import (
    MODEL_KEY_PREFIXES,
    UNSTACKED_LAYER_KEY,
    ShardedChunk,
    sharded_chunks,
    stacks_layers,
    tensor_location,
)
from megatron_webrl.model.convert.dist_checkpoint_files import (
    DistCheckpointReader,
    DistCheckpointWriter,
    with_own_storage,
)
from megatron_webrl.model.convert.hf_files import (
    HFModel,
    HFTensor,
    LoadError,
    bitwise_equal,
    open_hf_model,
    write_hf_model,
)
from megatron_webrl.model.convert.hf_reader import HFReader, ScratchBuffers, copy_transposed, fused_expert_index
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layout import ParallelSizes, check_parallel_sizes, expert_rank, pipeline_stages
from megatron_webrl.model.parameter_map import ParameterMapping, parameter_mappings, parameter_shapes

MEGATRON_FOLDER, HF_FOLDER = "megatron", "hf"
CHUNK_OVERHEAD_BYTES = 4096  # bytes that a chunk and its description take on disk beside its contents, at most
COMPARE_CHUNK_BYTES = 64 << 20  # bytes at once when comparing

ProgressFactory = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Shows progress: called with what is done and how many bytes there are, gives what to call with bytes done."""


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """A bar that shows nothing."""
    return nullcontext(lambda done: None)


@dataclass(frozen=True)
class ConversionOptions:
    """What both directions can be told. `dtype`: of the result; None keeps each tensor's own."""

    dtype: torch.dtype | None = None
    overwrite: bool = False
    verify: bool = False
    progress: ProgressFactory = no_progress


@dataclass(frozen=True)
class ConversionSummary:
    """What was written: Hugging Face tensors, bytes of weights."""

    tensors: int
    nbytes: int


def hf_to_megatron(source: Path, target: Path, sizes: ParallelSizes, options: ConversionOptions) -> ConversionSummary:
    """Write the weights of a Hugging Face folder as a checkpoint with a file for each (stage, expert, tensor) rank.

    Experts are split over tensor-parallel ranks, too: `sizes.expert_tensor` counts as `sizes.tensor`. Peak memory
    beyond the mapped files is two chunks. Raises ValueError (LoadError, StagingError) for a folder that is no complete
    Qwen3-VL, sizes that do not fit the model, a target that is taken, and results that differ from the source; the
    target then does not exist.
    """
    description = load_hf_config(source)
    try:
        # Files are cut for tensor-parallel ranks throughout, experts included.
        check_parallel_sizes(description.text_config, replace(sizes, expert_tensor=sizes.tensor))
    except ValueError as error:
        raise ValueError(f"{error} ({source / 'config.json'})") from error
    with (
        open_hf_model(source, description) as model,
        atomic_folder(target, source, overwrite=options.overwrite) as folder,
    ):
        _check_types(model, description, options.dtype)
        total = sum(_nbytes(tensor, options.dtype) for tensor in model.tensors.values())
        chunks = len(model.mappings) * sizes.tensor
        check_free_space(folder, total + chunks * CHUNK_OVERHEAD_BYTES + _description_size(source))
        folders.copy_metadata(source, folder / HF_FOLDER)
        with options.progress("writing", total) as advance:
            _write_chunks(model, description, folder / MEGATRON_FOLDER, sizes, options.dtype, advance)
        if options.dtype is not None:
            _name_type(folder / HF_FOLDER / "config.json", options.dtype)
        if options.verify:
            with (
                DistCheckpointReader(folder / MEGATRON_FOLDER) as reader,
                options.progress("verifying", total) as advance,
            ):
                check_checkpoint(reader, description)
                _compare(model, reader, description, options.dtype, advance)
    return ConversionSummary(len(model.tensors), total)


def megatron_to_hf(source: Path, target: Path, shard_bytes: int, options: ConversionOptions) -> ConversionSummary:
    """Write a checkpoint's weights as a Hugging Face folder, in safetensors files of at most `shard_bytes`.

    `source` is a converted checkpoint, one of a trainer, or a trainer's folder of checkpoints. Peak memory beyond the
    mapped files is two tensors (of fused experts, two experts'). Raises ValueError as `hf_to_megatron` does.
    """
    source = find_checkpoint(source)
    description = load_hf_config(source / HF_FOLDER)
    with (
        DistCheckpointReader(source / MEGATRON_FOLDER) as reader,
        atomic_folder(target, source, overwrite=options.overwrite) as folder,
    ):
        check_checkpoint(reader, description)
        assembly = HFReader(reader, description, options.dtype)
        specs = assembly.tensor_specs()
        total = sum(spec.nbytes for spec in specs)
        check_free_space(folder, total + len(specs) * CHUNK_OVERHEAD_BYTES + _description_size(source / HF_FOLDER))
        folders.copy_metadata(source / HF_FOLDER, folder)
        if options.dtype is not None:
            _name_type(folder / "config.json", options.dtype)
        with options.progress("writing", total) as advance:
            write_hf_model(folder, specs, lambda spec: _counted(assembly.read_parts(spec.name), advance), shard_bytes)
        if options.verify:
            with open_hf_model(folder, description) as model, options.progress("verifying", total) as advance:
                _compare(model, reader, description, options.dtype, advance)
    return ConversionSummary(len(specs), total)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the one that its file `latest` names. Raises LoadError."""
    pointer = path / "latest"
    found = path / pointer.read_text().strip() if pointer.is_file() else path
    for needed in (Path(MEGATRON_FOLDER, ".metadata"), Path(HF_FOLDER, "config.json")):
        if not (found / needed).is_file():
            raise LoadError(f"{found} is no checkpoint: it holds no {needed}")
    return found


def check_checkpoint(reader: DistCheckpointReader, hf_config: Any) -> None:
    """Refuse anything but exactly the model's tensors, whole. Raises LoadError."""
    text = hf_config.text_config
    entries = parameter_mappings(hf_config)
    stacked, shapes, known = UNSTACKED_LAYER_KEY not in reader.tensors, parameter_shapes(entries, 1), set()
    for entry in entries:
        where = tensor_location(entry, text, stacked)
        if where.key in known:
            continue
        known.add(where.key)
        expected = (*where.leading_sizes, *shapes[entry.megatron_param])
        if where.key not in reader.tensors:
            raise LoadError(f"tensor {where.key} {list(expected)} is missing from {reader.folder}")
        found = reader.tensors[where.key].shape
        padded = entry.layout.kind == "vocabulary" and found[0] >= expected[0] and found[1:] == expected[1:]
        if found != expected and not padded:
            raise LoadError(f"tensor {where.key} of {reader.folder} has shape {list(found)}, expected {list(expected)}")
        reader.check_coverage(where.key)
    for key in sorted(reader.tensors):
        if key.startswith(MODEL_KEY_PREFIXES) and key not in known:
            raise LoadError(f"tensor {key} of {reader.folder} is unexpected: the model of config.json has none such")


def _write_chunks(
    model: HFModel,
    description: Any,
    folder: Path,
    sizes: ParallelSizes,
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    text, scratch, stage = description.text_config, ScratchBuffers(), 0
    stacked = stacks_layers(text)
    parameters: dict[str, list[ParameterMapping]] = {}
    for entry in model.mappings:
        parameters.setdefault(entry.megatron_param, []).append(entry)
    shapes = parameter_shapes(model.mappings, sizes.tensor, sizes.tensor)
    with DistCheckpointWriter(folder) as writer:
        for parameter, entries in parameters.items():
            first, where = entries[0], tensor_location(entries[0], text, stacked)
            # A tied embedding is stored once, with the first stage that holds it.
            if (held := pipeline_stages(first, text.num_hidden_layers, sizes, tied=False)[0]) != stage:
                writer.close_files()
                stage = held
            expert = 0 if first.expert is None else expert_rank(first.expert, text.num_experts, sizes)
            base = (stage * sizes.expert + expert) * sizes.tensor
            kind = dtype or model.tensors[first.hf_param].dtype
            replicated = first.layout.kind == "replicated"
            dim = 1 if first.layout.kind == "row" else 0
            split = 1 if replicated else sizes.tensor
            shape = tuple(size * split if axis == dim else size for axis, size in enumerate(shapes[parameter]))
            for rank in range(split):
                file = f"__{base + rank}_0.distcp"
                for share in sharded_chunks(entries, rank, sizes.tensor):
                    tensor = _filled(share, model.tensors, kind, scratch)
                    writer.write_chunk(
                        file, where.key, (*where.leading_sizes, *shape), (*where.leading_index, *share.offsets), tensor
                    )
                    advance(tensor.nbytes)
            if where.extra_state_key is not None:
                writer.write_object(f"__{base}_0.distcp", where.extra_state_key, None)
        writer.finish()


def _filled(share: ShardedChunk, tensors: dict[str, HFTensor], dtype: torch.dtype, scratch: ScratchBuffers) -> Tensor:
    """A chunk's contents: the mapped file itself where they lie there in one piece, else put together."""
    found = [
        (tensors[entry.hf_param][entry.tensor_index(piece)], entry, target) for entry, piece, target in share.sources
    ]
    if len(found) == 1:
        tensor, entry, _ = found[0]
        if tensor.shape == share.shape and not entry.transposed and tensor.dtype == dtype and tensor.is_contiguous():
            return with_own_storage(tensor)
    chunk = scratch.allocate(share.shape, dtype)
    if sum(tensor.numel() for tensor, _, _ in found) < chunk.numel():
        chunk.zero_()
    for tensor, entry, target in found:
        if entry.transposed:
            copy_transposed(chunk[target], tensor)
        else:
            chunk[target].copy_(tensor)
    return chunk


def _compare(
    model: HFModel,
    reader: DistCheckpointReader,
    description: Any,
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    """Refuse a checkpoint that does not hold the folder's tensors bit for bit, both taken as `dtype`."""
    assembly = HFReader(reader, description, dtype)
    for name, entries in groupby(model.mappings, key=lambda entry: entry.hf_param):
        tensor = model.tensors[name]
        for number, part in groupby(entries, key=fused_expert_index):
            stored = assembly.read_part(list(part))
            expected = tensor[:] if number is None else tensor[number]
            rows = max(1, COMPARE_CHUNK_BYTES // expected[0].nbytes)
            for start in range(0, len(expected), rows):
                wanted, found = expected[start : start + rows], stored[start : start + rows]
                if not bitwise_equal(wanted if dtype is None else wanted.to(dtype), found):
                    raise LoadError(f"tensor {name} of {tensor.path} differs from what {reader.folder} holds of it")
            advance(stored.nbytes)


def _check_types(model: HFModel, description: Any, dtype: torch.dtype | None) -> None:
    """Refuse tensors of different types that the checkpoint keeps as one. Raises LoadError."""
    stacked = stacks_layers(description.text_config)
    firsts: dict[str, HFTensor] = {}
    for entry in model.mappings:
        tensor = model.tensors[entry.hf_param]
        first = firsts.setdefault(tensor_location(entry, description.text_config, stacked).key, tensor)
        if tensor.dtype != first.dtype and dtype is None:
            raise LoadError(
                f"tensor {tensor.name} of {tensor.path} has type {tensor.stored_dtype}, but {first.name} of "
                f"{first.path} has {first.stored_dtype}, and a checkpoint stores both in one tensor; "
                "convert to one type with --dtype"
            )


def _counted(parts: Iterable[Tensor], advance: Callable[[int], object]) -> Iterator[Tensor]:
    for part in parts:
        yield part
        advance(part.nbytes)


def _nbytes(tensor: HFTensor, dtype: torch.dtype | None) -> int:
    return torch.Size(tensor.shape).numel() * (dtype or tensor.dtype).itemsize


def _description_size(source: Path) -> int:
    return sum(path.stat().st_size for path in folders.metadata_files(source))


def _name_type(config: Path, dtype: torch.dtype) -> None:
    """Put the type into a config.json wherever it names one."""
    content = json.loads(config.read_text())
    for part in (content, content.get("text_config", {}), content.get("vision_config", {})):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n")
