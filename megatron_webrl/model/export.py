"""The model's weights as Hugging Face tensors, gathered one parameter at a time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
from megatron.core.utils import get_pg_size
from torch import Tensor

from megatron_webrl.model.parameter_map import Entry, from_megatron
from megatron_webrl.model.qwen3_vl import Qwen3VL


def hf_manifest(model: Qwen3VL) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type name ("float32", "bfloat16") of every Hugging Face tensor, in the order of `hf_tensors`."""
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    return [(entry.name, entry.shape, dtype) for entry in model.entries]


def hf_tensors(model: Qwen3VL) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor with its name, the same on every tensor-parallel rank.

    Collective over the tensor-parallel group: every rank must take all tensors. Beyond the model, one gathered
    parameter is held at a time. Replicated tensors are the model's own memory: do not write to them.
    """
    parameters = dict(model.named_parameters())
    for name, entries in groupby(model.entries, key=lambda entry: entry.parameter):
        yield from _gathered(model, parameters[name].detach(), list(entries))


def _gathered(model: Qwen3VL, parameter: Tensor, entries: list[Entry]) -> Iterator[tuple[str, Tensor]]:
    group = model.pg_collection.tp
    shards = [parameter]
    if entries[0].layout.kind != "replicated" and get_pg_size(group) > 1:
        shards = [torch.empty_like(parameter) for _ in range(get_pg_size(group))]
        torch.distributed.all_gather(shards, parameter.contiguous(), group=group)
    for entry in entries:
        if entry.layout.kind == "replicated":
            yield entry.name, parameter
            continue
        tensor = parameter.new_empty(entry.tensor_shape)
        from_megatron(entry, shards, tensor)
        yield entry.name, tensor
