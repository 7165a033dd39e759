"""Convert between Hugging Face folders and Megatron's distributed checkpoints, one part of a tensor at a time.

    OUT/megatron/     the weights, in the format of `dist_checkpoint_files`
    OUT/hf/           all files of the Hugging Face folder except weights
    OUT/passthrough/  its tensors that have no parameter, if the architecture names such (`passthrough.py`)

A checkpoint stores each parameter as one tensor in its unsharded shape (the vocabulary may be padded), cut into one
chunk per rank. It loads at any parallel sizes.
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

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert import hf_files as folders
from megatron_webrl.model.convert.atomic_folder import atomic_folder, check_free_space
from megatron_webrl.model.convert.dist_checkpoint_files import (
    MODEL_KEY_PREFIXES,
    UNSTACKED_LAYER_KEY,
    DistCheckpointReader,
    DistCheckpointWriter,
    ShardedChunk,
    sharded_chunks,
    stacks_layers,
    tensor_location,
    with_own_storage,
)
from megatron_webrl.model.convert.hf_files import (
    HFModel,
    HFTensor,
    LoadError,
    TensorSpec,
    bitwise_equal,
    compare_passthrough,
    open_hf_model,
    open_passthrough,
    passthrough_specs,
    read_parts,
    write_hf_model,
    write_passthrough,
)
from megatron_webrl.model.convert.hf_reader import HFReader, ScratchBuffers, copy_transposed, fused_expert_index
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layout import ParallelSizes, check_parallel_sizes, expert_rank, pipeline_stages
from megatron_webrl.model.parameter_map import ParameterMapping, parameter_shapes

MEGATRON_FOLDER, HF_FOLDER = "megatron", "hf"
CHUNK_OVERHEAD_BYTES = 4096  # most disk space of a chunk beyond its contents
COMPARE_CHUNK_BYTES = 64 << 20  # compared at a time

ProgressFactory = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Makes a progress bar from (label, total bytes); the context yields a callback for bytes done."""


def no_progress(label: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    return nullcontext(lambda done: None)


@dataclass(frozen=True)
class ConversionOptions:
    """Options of both directions. `dtype`: of the result; None keeps each tensor's dtype."""

    dtype: torch.dtype | None = None
    overwrite: bool = False
    verify: bool = False
    progress: ProgressFactory = no_progress


@dataclass(frozen=True)
class ConversionSummary:
    """Number of Hugging Face tensors and bytes of weights written."""

    tensors: int
    nbytes: int


def hf_to_megatron(source: Path, target: Path, sizes: ParallelSizes, options: ConversionOptions) -> ConversionSummary:
    """Write the weights of a Hugging Face folder as a checkpoint with one file per (stage, expert, tensor) rank.

    Experts are sharded over tensor-parallel ranks, too: `sizes.expert_tensor` is taken as `sizes.tensor`. Peak memory
    beyond the mapped files is two chunks. Raises ValueError (LoadError, TargetFolderError), and creates no target, for
    an incomplete folder, sizes that do not divide the model, an existing target, and a result unlike the source.
    """
    hf_config = load_hf_config(source)
    try:
        check_parallel_sizes(hf_config.text_config, replace(sizes, expert_tensor=sizes.tensor))
    except ValueError as error:
        raise ValueError(f"{error} ({source / 'config.json'})") from error
    with open_hf_model(source, hf_config) as model, atomic_folder(target, source, overwrite=options.overwrite) as out:
        _check_dtypes(model, hf_config, options.dtype)
        written = (*model.tensors.values(), *model.passthrough.values())
        total = sum(_nbytes(tensor, options.dtype) for tensor in written)
        chunks = len(model.mappings) * sizes.tensor
        check_free_space(out, total + chunks * CHUNK_OVERHEAD_BYTES + _metadata_size(source))
        folders.copy_metadata(source, out / HF_FOLDER)
        with options.progress("writing", total) as advance:
            _write_chunks(model, hf_config, out / MEGATRON_FOLDER, sizes, options.dtype, advance)
            write_passthrough(model.passthrough, out, options.dtype, advance)
        if options.dtype is not None:
            _set_dtype(out / HF_FOLDER / "config.json", options.dtype)
        if options.verify:
            with (
                DistCheckpointReader(out / MEGATRON_FOLDER) as ckpt,
                open_passthrough(out, hf_config.model_type) as kept,
                options.progress("verifying", total) as advance,
            ):
                check_checkpoint(ckpt, hf_config)
                _compare(model, ckpt, hf_config, options.dtype, advance)
                compare_passthrough(model.passthrough, kept, options.dtype, advance)
    return ConversionSummary(len(written), total)


def megatron_to_hf(source: Path, target: Path, shard_bytes: int, options: ConversionOptions) -> ConversionSummary:
    """Write a checkpoint's weights as a Hugging Face folder, in safetensors files of at most `shard_bytes`.

    `source` is a converted checkpoint, a trainer's checkpoint or a trainer's folder of checkpoints. Peak memory beyond
    the mapped files is two tensors (two experts of fused tensors). Raises ValueError like `hf_to_megatron`.
    """
    source = find_checkpoint(source)
    hf_config = load_hf_config(source / HF_FOLDER)
    with (
        DistCheckpointReader(source / MEGATRON_FOLDER) as ckpt,
        open_passthrough(source, hf_config.model_type) as kept,
        atomic_folder(target, source, overwrite=options.overwrite) as out,
    ):
        check_checkpoint(ckpt, hf_config)
        hf = HFReader(ckpt, hf_config, options.dtype)
        specs = [*hf.tensor_specs(), *passthrough_specs(kept, options.dtype)]

        def parts(spec: TensorSpec) -> Iterator[Tensor]:
            return read_parts(kept[spec.name], options.dtype) if spec.name in kept else hf.read_parts(spec.name)

        total = sum(spec.nbytes for spec in specs)
        check_free_space(out, total + len(specs) * CHUNK_OVERHEAD_BYTES + _metadata_size(source / HF_FOLDER))
        folders.copy_metadata(source / HF_FOLDER, out)
        if options.dtype is not None:
            _set_dtype(out / "config.json", options.dtype)
        with options.progress("writing", total) as advance:
            write_hf_model(out, specs, lambda spec: _report_progress(parts(spec), advance), shard_bytes)
        if options.verify:
            with open_hf_model(out, hf_config) as model, options.progress("verifying", total) as advance:
                _compare(model, ckpt, hf_config, options.dtype, advance)
                compare_passthrough(kept, model.passthrough, options.dtype, advance)
    return ConversionSummary(len(specs), total)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path: the path itself, or the one named by its file `latest`. Raises LoadError."""
    pointer = path / "latest"
    found = path / pointer.read_text().strip() if pointer.is_file() else path
    for needed in (Path(MEGATRON_FOLDER, ".metadata"), Path(HF_FOLDER, "config.json")):
        if not (found / needed).is_file():
            raise LoadError(f"{found} is no checkpoint: it holds no {needed}")
    return found


def check_checkpoint(reader: DistCheckpointReader, hf_config: Any) -> None:
    """Raise LoadError unless the checkpoint holds exactly the model's tensors, completely."""
    text = hf_config.text_config
    mappings = parameter_mappings(hf_config)
    stacked, shapes, known = UNSTACKED_LAYER_KEY not in reader.tensors, parameter_shapes(mappings, 1), set()
    for mapping in mappings:
        where = tensor_location(mapping, text, stacked)
        if where.key in known:
            continue
        known.add(where.key)
        expected = (*where.leading_sizes, *shapes[mapping.megatron_param])
        if where.key not in reader.tensors:
            raise LoadError(f"tensor {where.key} {list(expected)} is missing from {reader.folder}")
        found = reader.tensors[where.key].shape
        padded = mapping.layout.kind == "vocabulary" and found[0] >= expected[0] and found[1:] == expected[1:]
        if found != expected and not padded:
            raise LoadError(f"tensor {where.key} of {reader.folder} has shape {list(found)}, expected {list(expected)}")
        reader.check_coverage(where.key)
    for key in sorted(reader.tensors):
        if key.startswith(MODEL_KEY_PREFIXES) and key not in known:
            raise LoadError(
                f"tensor {key} of {reader.folder} is unexpected: the model of config.json has no such tensor"
            )


def _write_chunks(
    model: HFModel,
    hf_config: Any,
    folder: Path,
    sizes: ParallelSizes,
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    text, scratch, stage = hf_config.text_config, ScratchBuffers(), 0
    stacked = stacks_layers(text)
    parameters: dict[str, list[ParameterMapping]] = {}
    for mapping in model.mappings:
        parameters.setdefault(mapping.megatron_param, []).append(mapping)
    shapes = parameter_shapes(model.mappings, sizes.tensor, sizes.tensor)
    with DistCheckpointWriter(folder) as writer:
        for parameter, mappings in parameters.items():
            first, where = mappings[0], tensor_location(mappings[0], text, stacked)
            # A tied embedding is stored once, by its first stage.
            if (first_stage := pipeline_stages(first, text.num_hidden_layers, sizes, tied=False)[0]) != stage:
                writer.close_files()
                stage = first_stage
            expert = 0 if first.expert is None else expert_rank(first.expert, text.num_experts, sizes)
            base = (stage * sizes.expert + expert) * sizes.tensor
            kind = dtype or model.tensors[first.hf_param].dtype
            replicated = first.layout.kind == "replicated"
            dim = 1 if first.layout.kind == "row" else 0
            split = 1 if replicated else sizes.tensor
            shape = tuple(size * split if axis == dim else size for axis, size in enumerate(shapes[parameter]))
            for rank in range(split):
                file = f"__{base + rank}_0.distcp"
                for chunk in sharded_chunks(mappings, rank, sizes.tensor):
                    tensor = _assemble(chunk, model.tensors, kind, scratch)
                    writer.write_chunk(
                        file, where.key, (*where.leading_sizes, *shape), (*where.leading_index, *chunk.offsets), tensor
                    )
                    advance(tensor.nbytes)
            if where.extra_state_key is not None:
                writer.write_object(f"__{base}_0.distcp", where.extra_state_key, None)
        writer.finish()


def _assemble(chunk: ShardedChunk, tensors: dict[str, HFTensor], dtype: torch.dtype, scratch: ScratchBuffers) -> Tensor:
    """Contents of a chunk: a view of the mapped file if they are contiguous there, else assembled in `scratch`."""
    parts = [(tensors[part.hf_param][part.tensor_index(piece)], part, target) for part, piece, target in chunk.sources]
    if len(parts) == 1:
        tensor, mapping, _ = parts[0]
        if tensor.shape == chunk.shape and not mapping.transposed and tensor.dtype == dtype and tensor.is_contiguous():
            return with_own_storage(tensor)
    result = scratch.allocate(chunk.shape, dtype)
    if sum(tensor.numel() for tensor, _, _ in parts) < result.numel():
        result.zero_()
    for tensor, mapping, target in parts:
        if mapping.transposed:
            copy_transposed(result[target], tensor)
        else:
            result[target].copy_(tensor)
    return result


def _compare(
    model: HFModel,
    reader: DistCheckpointReader,
    hf_config: Any,
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    """Raise LoadError unless the checkpoint equals the folder's tensors bit for bit, converted to `dtype`."""
    hf_reader = HFReader(reader, hf_config, dtype)
    for name, mappings in groupby(model.mappings, key=lambda mapping: mapping.hf_param):
        tensor = model.tensors[name]
        for number, part in groupby(mappings, key=fused_expert_index):
            stored = hf_reader.read_part(list(part))
            expected = tensor[:] if number is None else tensor[number]
            rows = max(1, COMPARE_CHUNK_BYTES // expected[0].nbytes)
            for start in range(0, len(expected), rows):
                original, converted = expected[start : start + rows], stored[start : start + rows]
                if not bitwise_equal(original if dtype is None else original.to(dtype), converted):
                    raise LoadError(f"tensor {name} of {tensor.path} differs from its copy in {reader.folder}")
            advance(stored.nbytes)


def _check_dtypes(model: HFModel, hf_config: Any, dtype: torch.dtype | None) -> None:
    """Raise LoadError for tensors of different dtypes that the checkpoint stores in one tensor."""
    stacked = stacks_layers(hf_config.text_config)
    firsts: dict[str, HFTensor] = {}
    for mapping in model.mappings:
        tensor = model.tensors[mapping.hf_param]
        first = firsts.setdefault(tensor_location(mapping, hf_config.text_config, stacked).key, tensor)
        if tensor.dtype != first.dtype and dtype is None:
            raise LoadError(
                f"tensor {tensor.name} of {tensor.path} has type {tensor.stored_dtype}, but {first.name} of "
                f"{first.path} has {first.stored_dtype}, and a checkpoint stores both in one tensor; "
                "convert to one type with --dtype"
            )


def _report_progress(parts: Iterable[Tensor], advance: Callable[[int], object]) -> Iterator[Tensor]:
    for part in parts:
        yield part
        advance(part.nbytes)


def _nbytes(tensor: HFTensor, dtype: torch.dtype | None) -> int:
    return torch.Size(tensor.shape).numel() * (dtype or tensor.dtype).itemsize


def _metadata_size(source: Path) -> int:
    return sum(path.stat().st_size for path in folders.metadata_files(source))


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Set the dtype in a config.json wherever it has one."""
    content = json.loads(config.read_text())
    for part in (content, content.get("text_config", {}), content.get("vision_config", {})):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n")
