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

from megatron_webrl.model import folder as folders
from megatron_webrl.model.assembly import Assembly, Scratch, copy_transposed, part_number
from megatron_webrl.model.description import describe
from megatron_webrl.model.dist_files import DistReader, DistWriter, alone
from megatron_webrl.model.hf_files import HFModel, HFTensor, LoadError, open_model, same_bits, write_model
from megatron_webrl.model.layout import Sizes, check_sizes, expert_rank, stages
from megatron_webrl.model.parameter_map import Entry, model_map, parameter_shapes
from megatron_webrl.model.staging import need_space, staged
from megatron_webrl.model.stored import FIRST_LAYER_ALONE, OWNED, Share, place, shares, stacks_layers

MEGATRON, HF = "megatron", "hf"
OVERHEAD = 4096  # bytes that a chunk and its description take on disk beside its contents, at most
COMPARED = 64 << 20  # bytes at once when comparing

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], object]]]
"""Shows progress: called with what is done and how many bytes there are, gives what to call with bytes done."""


def no_bar(what: str, total: int) -> AbstractContextManager[Callable[[int], object]]:
    """A bar that shows nothing."""
    return nullcontext(lambda done: None)


@dataclass(frozen=True)
class Options:
    """What both directions can be told. `dtype`: of the result; None keeps each tensor's own."""

    dtype: torch.dtype | None = None
    overwrite: bool = False
    verify: bool = False
    bar: Bar = no_bar


@dataclass(frozen=True)
class Summary:
    """What was written: Hugging Face tensors, bytes of weights."""

    tensors: int
    nbytes: int


def hf_to_megatron(source: Path, target: Path, sizes: Sizes, options: Options) -> Summary:
    """Write the weights of a Hugging Face folder as a checkpoint with a file for each (stage, expert, tensor) rank.

    Experts are split over tensor-parallel ranks, too: `sizes.expert_tensor` counts as `sizes.tensor`. Peak memory
    beyond the mapped files is two chunks. Raises ValueError (LoadError, StagingError) for a folder that is no complete
    Qwen3-VL, sizes that do not fit the model, a target that is taken, and results that differ from the source; the
    target then does not exist.
    """
    description = describe(source)
    try:
        # Files are cut for tensor-parallel ranks throughout, experts included.
        check_sizes(description.text_config, replace(sizes, expert_tensor=sizes.tensor))
    except ValueError as error:
        raise ValueError(f"{error} ({source / 'config.json'})") from error
    with open_model(source, description) as model, staged(target, source, overwrite=options.overwrite) as folder:
        _check_types(model, description, options.dtype)
        total = sum(_nbytes(tensor, options.dtype) for tensor in model.tensors.values())
        chunks = len(model.entries) * sizes.tensor
        need_space(folder, total + chunks * OVERHEAD + _description_size(source))
        folders.copy_description(source, folder / HF)
        with options.bar("writing", total) as advance:
            _write_chunks(model, description, folder / MEGATRON, sizes, options.dtype, advance)
        if options.dtype is not None:
            _name_type(folder / HF / "config.json", options.dtype)
        if options.verify:
            with DistReader(folder / MEGATRON) as reader, options.bar("verifying", total) as advance:
                check_checkpoint(reader, description)
                _compare(model, reader, description, options.dtype, advance)
    return Summary(len(model.tensors), total)


def megatron_to_hf(source: Path, target: Path, shard_bytes: int, options: Options) -> Summary:
    """Write a checkpoint's weights as a Hugging Face folder, in safetensors files of at most `shard_bytes`.

    `source` is a converted checkpoint, one of a trainer, or a trainer's folder of checkpoints. Peak memory beyond the
    mapped files is two tensors (of fused experts, two experts'). Raises ValueError as `hf_to_megatron` does.
    """
    source = find_checkpoint(source)
    description = describe(source / HF)
    with DistReader(source / MEGATRON) as reader, staged(target, source, overwrite=options.overwrite) as folder:
        check_checkpoint(reader, description)
        assembly = Assembly(reader, description, options.dtype)
        specs = assembly.specs()
        total = sum(spec.nbytes for spec in specs)
        need_space(folder, total + len(specs) * OVERHEAD + _description_size(source / HF))
        folders.copy_description(source / HF, folder)
        if options.dtype is not None:
            _name_type(folder / "config.json", options.dtype)
        with options.bar("writing", total) as advance:
            write_model(folder, specs, lambda spec: _counted(assembly.parts(spec.name), advance), shard_bytes)
        if options.verify:
            with open_model(folder, description) as model, options.bar("verifying", total) as advance:
                _compare(model, reader, description, options.dtype, advance)
    return Summary(len(specs), total)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the one that its file `latest` names. Raises LoadError."""
    pointer = path / "latest"
    found = path / pointer.read_text().strip() if pointer.is_file() else path
    for needed in (Path(MEGATRON, ".metadata"), Path(HF, "config.json")):
        if not (found / needed).is_file():
            raise LoadError(f"{found} is no checkpoint: it holds no {needed}")
    return found


def check_checkpoint(reader: DistReader, description: Any) -> None:
    """Refuse anything but exactly the model's tensors, whole. Raises LoadError."""
    text = description.text_config
    entries = model_map(description)
    stacked, shapes, known = FIRST_LAYER_ALONE not in reader.tensors, parameter_shapes(entries, 1), set()
    for entry in entries:
        where = place(entry, text, stacked)
        if where.key in known:
            continue
        known.add(where.key)
        expected = (*where.sizes, *shapes[entry.parameter])
        if where.key not in reader.tensors:
            raise LoadError(f"tensor {where.key} {list(expected)} is missing from {reader.folder}")
        found = reader.tensors[where.key].shape
        padded = entry.layout.kind == "vocabulary" and found[0] >= expected[0] and found[1:] == expected[1:]
        if found != expected and not padded:
            raise LoadError(f"tensor {where.key} of {reader.folder} has shape {list(found)}, expected {list(expected)}")
        reader.check(where.key)
    for key in sorted(reader.tensors):
        if key.startswith(OWNED) and key not in known:
            raise LoadError(f"tensor {key} of {reader.folder} is unexpected: the model of config.json has none such")


def _write_chunks(
    model: HFModel,
    description: Any,
    folder: Path,
    sizes: Sizes,
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    text, scratch, stage = description.text_config, Scratch(), 0
    stacked = stacks_layers(text)
    parameters: dict[str, list[Entry]] = {}
    for entry in model.entries:
        parameters.setdefault(entry.parameter, []).append(entry)
    shapes = parameter_shapes(model.entries, sizes.tensor, sizes.tensor)
    with DistWriter(folder) as writer:
        for parameter, entries in parameters.items():
            first, where = entries[0], place(entries[0], text, stacked)
            # A tied embedding is stored once, with the first stage that holds it.
            if (held := stages(first, text.num_hidden_layers, sizes, tied=False)[0]) != stage:
                writer.close_files()
                stage = held
            expert = 0 if first.expert is None else expert_rank(first.expert, text.num_experts, sizes)
            base = (stage * sizes.expert + expert) * sizes.tensor
            kind = dtype or model.tensors[first.name].dtype
            replicated = first.layout.kind == "replicated"
            dim = 1 if first.layout.kind == "row" else 0
            split = 1 if replicated else sizes.tensor
            shape = tuple(size * split if axis == dim else size for axis, size in enumerate(shapes[parameter]))
            for rank in range(split):
                file = f"__{base + rank}_0.distcp"
                for share in shares(entries, rank, sizes.tensor):
                    tensor = _filled(share, model.tensors, kind, scratch)
                    writer.write(file, where.key, (*where.sizes, *shape), (*where.index, *share.offsets), tensor)
                    advance(tensor.nbytes)
            if where.extra_state is not None:
                writer.write_object(f"__{base}_0.distcp", where.extra_state, None)
        writer.finish()


def _filled(share: Share, tensors: dict[str, HFTensor], dtype: torch.dtype, scratch: Scratch) -> Tensor:
    """A chunk's contents: the mapped file itself where they lie there in one piece, else put together."""
    found = [(tensors[entry.name][entry.index(piece)], entry, target) for entry, piece, target in share.fills]
    if len(found) == 1:
        tensor, entry, _ = found[0]
        if tensor.shape == share.shape and not entry.transposed and tensor.dtype == dtype and tensor.is_contiguous():
            return alone(tensor)
    chunk = scratch.take(share.shape, dtype)
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
    reader: DistReader,
    description: Any,
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    """Refuse a checkpoint that does not hold the folder's tensors bit for bit, both taken as `dtype`."""
    assembly = Assembly(reader, description, dtype)
    for name, entries in groupby(model.entries, key=lambda entry: entry.name):
        tensor = model.tensors[name]
        for number, part in groupby(entries, key=part_number):
            stored = assembly.part(list(part))
            expected = tensor[:] if number is None else tensor[number]
            rows = max(1, COMPARED // expected[0].nbytes)
            for start in range(0, len(expected), rows):
                wanted, found = expected[start : start + rows], stored[start : start + rows]
                if not same_bits(wanted if dtype is None else wanted.to(dtype), found):
                    raise LoadError(f"tensor {name} of {tensor.path} differs from what {reader.folder} holds of it")
            advance(stored.nbytes)


def _check_types(model: HFModel, description: Any, dtype: torch.dtype | None) -> None:
    """Refuse tensors of different types that the checkpoint keeps as one. Raises LoadError."""
    stacked = stacks_layers(description.text_config)
    firsts: dict[str, HFTensor] = {}
    for entry in model.entries:
        tensor = model.tensors[entry.name]
        first = firsts.setdefault(place(entry, description.text_config, stacked).key, tensor)
        if tensor.dtype != first.dtype and dtype is None:
            raise LoadError(
                f"tensor {tensor.name} of {tensor.path} has type {tensor.stored}, but {first.name} of {first.path} "
                f"has {first.stored}, and a checkpoint keeps both in one tensor; convert to one type with --dtype"
            )


def _counted(parts: Iterable[Tensor], advance: Callable[[int], object]) -> Iterator[Tensor]:
    for part in parts:
        yield part
        advance(part.nbytes)


def _nbytes(tensor: HFTensor, dtype: torch.dtype | None) -> int:
    return torch.Size(tensor.shape).numel() * (dtype or tensor.dtype).itemsize


def _description_size(source: Path) -> int:
    return sum(path.stat().st_size for path in folders.description_files(source))


def _name_type(config: Path, dtype: torch.dtype) -> None:
    """Put the type into a config.json wherever it names one."""
    content = json.loads(config.read_text())
    for part in (content, content.get("text_config", {}), content.get("vision_config", {})):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n")
