"""Convert between Hugging Face folders and Megatron's distributed checkpoints, one part of a tensor at a time.

    OUT/megatron/     the weights, in the format of `dist_checkpoint_files`
    OUT/hf/           all files of the Hugging Face folder except weights
    OUT/passthrough/  its tensors that have no parameter, if the architecture names such

A checkpoint stores each parameter as one tensor in its unsharded shape (the vocabulary may be padded), cut into one
chunk per rank. It loads at any parallel sizes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert.atomic_folder import atomic_folder, check_free_space
from megatron_webrl.model.convert.checkpoint_folder import HF_FOLDER, MEGATRON_FOLDER, LoadError, find_checkpoint
from megatron_webrl.model.convert.dist_checkpoint_files import (
    MODEL_KEY_PREFIXES,
    UNSTACKED_LAYER_KEY,
    DistCheckpointReader,
    DistCheckpointWriter,
    TensorLocation,
    stacks_layers,
    tensor_location,
)
from megatron_webrl.model.convert.hf_files import (
    DTYPE_NAMES,
    HFModel,
    HFTensor,
    TensorSpec,
    bitwise_equal,
    copy_metadata,
    open_hf_model,
    open_passthrough,
    passthrough_specs,
    write_hf_model,
    write_passthrough,
)
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layout import ParallelSizes, check_parallel_sizes, expert_rank, pipeline_stages
from megatron_webrl.model.parameter_map import ParameterMapping, from_megatron, parameter_shapes, to_megatron

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
    beyond the mapped files is two parameters. Raises ValueError (LoadError, TargetFolderError), and creates no target,
    for an incomplete folder, sizes that do not divide the model, an existing target, and a result unlike the source.
    """
    hf_config = load_hf_config(source)
    try:
        check_parallel_sizes(hf_config.text_config, replace(sizes, expert_tensor=sizes.tensor))
    except ValueError as error:
        raise ValueError(f"{error} ({source / 'config.json'})") from error
    with open_hf_model(source, hf_config) as model, atomic_folder(target, source, overwrite=options.overwrite) as out:
        _check_dtypes(model, hf_config, options.dtype)
        written = (*model.tensors.values(), *model.passthrough.values())
        total = sum(TensorSpec(each.name, each.shape, options.dtype or each.dtype).nbytes for each in written)
        check_free_space(out, total)
        copy_metadata(source, out / HF_FOLDER)
        with options.progress("writing", total) as advance:
            _write_weights(model, hf_config, out / MEGATRON_FOLDER, sizes, options.dtype, advance)
            write_passthrough(model.passthrough, out, options.dtype)
        if options.dtype is not None:
            _set_dtype(out / HF_FOLDER / "config.json", options.dtype)
        if options.verify:
            weights = CheckpointWeights(out / MEGATRON_FOLDER, hf_config, model.mappings, options.dtype)
            with open_passthrough(out, hf_config.model_type) as kept:
                _compare(model, weights, kept, total, options)
    return ConversionSummary(len(written), total)


def megatron_to_hf(source: Path, target: Path, shard_bytes: int, options: ConversionOptions) -> ConversionSummary:
    """Write a checkpoint's weights as a Hugging Face folder, in safetensors files of at most `shard_bytes`.

    `source` is a converted checkpoint, a trainer's checkpoint or a trainer's folder of checkpoints. Peak memory beyond
    the mapped files is a tensor and a parameter. Raises ValueError like `hf_to_megatron`.
    """
    source = find_checkpoint(source)
    hf_config = load_hf_config(source / HF_FOLDER)
    with (
        open_passthrough(source, hf_config.model_type) as kept,
        atomic_folder(target, source, overwrite=options.overwrite) as out,
    ):
        weights = CheckpointWeights(source / MEGATRON_FOLDER, hf_config, parameter_mappings(hf_config), options.dtype)
        specs = [*weights.specs(), *passthrough_specs(kept, options.dtype)]
        total = sum(spec.nbytes for spec in specs)
        check_free_space(out, total)
        copy_metadata(source / HF_FOLDER, out)
        if options.dtype is not None:
            _set_dtype(out / "config.json", options.dtype)
        with options.progress("writing", total) as advance:

            def read(spec: TensorSpec) -> Tensor:
                advance(spec.nbytes)
                return kept[spec.name].read(spec.dtype) if spec.name in kept else weights.read(spec.name)

            write_hf_model(out, specs, read, shard_bytes)
        if options.verify:
            with open_hf_model(out, hf_config) as model:
                _compare(model, weights, kept, total, options)
    return ConversionSummary(len(specs), total)


class CheckpointWeights:
    """The Hugging Face tensors of a checkpoint's weights, converted to `dtype` if it is given.

    Raises LoadError unless the checkpoint holds exactly the parameters of the mappings, completely.
    """

    def __init__(
        self, folder: Path, hf_config: Any, mappings: Sequence[ParameterMapping], dtype: torch.dtype | None
    ) -> None:
        self.reader, self.text_config, self.dtype = DistCheckpointReader(folder), hf_config.text_config, dtype
        self.shapes = parameter_shapes(mappings, 1)
        self.mappings: dict[str, list[ParameterMapping]] = {}
        for mapping in mappings:
            self.mappings.setdefault(mapping.hf_param, []).append(mapping)
        self._last: tuple[str, Tensor] | None = None  # parameter: tensors of one parameter follow each other
        self._check()

    def specs(self) -> list[TensorSpec]:
        """Specs of all tensors, in the order of the parameter map. Raises LoadError for an unsupported dtype."""
        return [TensorSpec(name, parts[0].tensor_shape, self._dtype(parts[0])) for name, parts in self.mappings.items()]

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        parts = self.mappings[name]
        tensor = torch.empty(parts[0].tensor_shape, dtype=self._dtype(parts[0]))
        for mapping in parts:
            from_megatron(mapping, [self._parameter(mapping)], tensor)
        return tensor

    def _parameter(self, mapping: ParameterMapping) -> Tensor:
        name = mapping.megatron_param
        if self._last is None or self._last[0] != name:
            self._last = None  # free it first
            self._last = name, self.reader.read(self._location(mapping), self.shapes[name])
        return self._last[1]

    def _location(self, mapping: ParameterMapping) -> TensorLocation:
        return tensor_location(mapping, self.text_config, UNSTACKED_LAYER_KEY not in self.reader.tensors)

    def _dtype(self, mapping: ParameterMapping) -> torch.dtype:
        key = self._location(mapping).key
        found = self.reader.tensors[key].properties.dtype
        if found not in DTYPE_NAMES:
            raise LoadError(f"tensor {key} of {self.reader.folder} has unsupported type {found}")
        return self.dtype or found

    def _check(self) -> None:
        known, tensors, folder = set(), self.reader.tensors, self.reader.folder
        for mapping in (mapping for parts in self.mappings.values() for mapping in parts):
            where = self._location(mapping)
            if where.key in known:
                continue
            known.add(where.key)
            expected = (*where.leading_sizes, *self.shapes[mapping.megatron_param])
            if where.key not in tensors:
                raise LoadError(f"tensor {where.key} {list(expected)} is missing from {folder}")
            found = tensors[where.key].size
            padded = mapping.layout.kind == "vocabulary" and found[0] >= expected[0] and found[1:] == expected[1:]
            if found != expected and not padded:
                raise LoadError(f"tensor {where.key} of {folder} has shape {list(found)}, expected {list(expected)}")
            self.reader.check_coverage(where.key)
        for key in sorted(tensors):
            if key.startswith(MODEL_KEY_PREFIXES) and key not in known:
                raise LoadError(f"tensor {key} of {folder} is unexpected: the model of config.json has no such tensor")


def _write_weights(
    model: HFModel,
    hf_config: Any,
    folder: Path,
    sizes: ParallelSizes,
    dtype: torch.dtype | None,
    advance: Callable[[int], object],
) -> None:
    text, size, writer = hf_config.text_config, sizes.tensor, DistCheckpointWriter(folder)
    parameters: dict[str, list[ParameterMapping]] = {}
    for mapping in model.mappings:
        parameters.setdefault(mapping.megatron_param, []).append(mapping)
    shapes = parameter_shapes(model.mappings, size, size)
    for name, mappings in parameters.items():
        first, where = mappings[0], tensor_location(mappings[0], text, stacks_layers(text))
        # A tied embedding is stored once, by its first stage.
        stage = pipeline_stages(first, text.num_hidden_layers, sizes, tied=False)[0]
        expert = 0 if first.expert is None else expert_rank(first.expert, text.num_experts, sizes)
        base = (stage * sizes.expert + expert) * size
        dim, ranks = int(first.layout.kind == "row"), 1 if first.layout.kind == "replicated" else size
        count = len(mappings) if first.layout.kind == "gate_up" else 1  # Megatron stores gate and up apart
        whole = list(shapes[name])
        whole[dim] *= ranks
        for rank in range(ranks):
            parameter = torch.empty(shapes[name], dtype=dtype or model.tensors[first.hf_param].dtype)
            for mapping in mappings:
                to_megatron(mapping, model.tensors[mapping.hf_param], parameter, rank, size)
            for index, chunk in enumerate(parameter.chunk(count)):
                offsets = [0] * len(whole)
                offsets[dim] = index * (whole[dim] // count) + rank * chunk.shape[dim]
                chunk = chunk.clone() if count > 1 else chunk  # torch.save writes whole storages
                shape, place = (*where.leading_sizes, *whole), (*where.leading_index, *offsets)
                writer.write_chunk(f"__{base + rank}_0.distcp", where.key, shape, place, chunk)
            advance(parameter.nbytes)
        if where.extra_state_key is not None:
            writer.write_object(f"__{base}_0.distcp", where.extra_state_key, None)
    writer.finish()


def _compare(
    model: HFModel, weights: CheckpointWeights, kept: dict[str, HFTensor], total: int, options: ConversionOptions
) -> None:
    """Raise LoadError unless checkpoint and folder hold the same tensors bit for bit, converted to the result's type.

    `kept`: the checkpoint's passthrough tensors; `total`: bytes of all tensors.
    """
    for name in sorted(model.passthrough.keys() ^ kept.keys()):
        tensor = model.passthrough.get(name) or kept[name]
        raise LoadError(f"tensor {name} of {tensor.path} has no counterpart")
    with options.progress("verifying", total) as advance:
        for name, tensor in (model.tensors | model.passthrough).items():
            copy = kept[name].read(options.dtype) if name in kept else weights.read(name)
            if not bitwise_equal(tensor.read(options.dtype), copy):
                raise LoadError(f"tensor {name} of {tensor.path} differs from its copy")
            advance(copy.nbytes)
            del copy  # before the next is read


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


def _set_dtype(config: Path, dtype: torch.dtype) -> None:
    """Set the dtype in a config.json wherever it has one."""
    content = json.loads(config.read_text())
    for part in (content, content.get("text_config", {}), content.get("vision_config", {})):
        for name in ("dtype", "torch_dtype"):
            if name in part:
                part[name] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(content, indent=2) + "\n")
