"""The model's weights as Hugging Face tensors, gathered on the first rank one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from megatron_webrl.model.groups import sizes_of
from megatron_webrl.model.layout import holders
from megatron_webrl.model.parameter_map import Entry, from_megatron, parameter_shapes
from megatron_webrl.model.qwen3_vl import Qwen3VL


def hf_manifest(chunks: Sequence[Qwen3VL]) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type name ("float32", "bfloat16") of every Hugging Face tensor, in the order of `hf_tensors`."""
    model = chunks[0]
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    return list(dict.fromkeys((entry.name, entry.tensor_shape, dtype) for entry in model.entries))


def hf_tensors(chunks: Sequence[Qwen3VL]) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor with its name, on the first rank; on the others nothing.

    Collective over all ranks: each must run through the whole iterator. Beyond the model, the first rank holds one
    tensor and the shards of one parameter at a time. A tensor may be the model's own memory: do not write to it.
    """
    gathering = _Gathering(chunks)
    for name, entries in groupby(chunks[0].entries, key=lambda entry: entry.name):
        tensor = gathering.tensor(list(entries))
        if tensor is not None:
            yield name, tensor


class _Gathering:
    """Brings shards to the first rank."""

    def __init__(self, chunks: Sequence[Qwen3VL]) -> None:
        model = chunks[0]
        self.description, self.sizes = model.description, sizes_of(model.pg_collection)
        self.dtype = model.config.params_dtype
        self.shapes = parameter_shapes(model.entries, self.sizes.tensor, self.sizes.expert_tensor)
        self.parameters = {name: p.detach() for chunk in chunks for name, p in chunk.canonical_parameters().items()}
        self.device = next(iter(self.parameters.values())).device
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._last: tuple[str, list[Tensor]] = ("", [])  # tensors that share a parameter follow each other

    def tensor(self, entries: list[Entry]) -> Tensor | None:
        """One whole Hugging Face tensor from its entries, on the first rank."""
        whole: Tensor | None = None
        for entry in entries:
            shards = self._shards(entry)
            if self.rank != 0:
                continue
            if entry.layout.kind == "replicated" and entry.whole:
                return shards[0]
            if whole is None:
                whole = torch.empty(entry.tensor_shape, dtype=self.dtype, device=self.device)
            from_megatron(entry, shards, whole)
        return whole

    def _shards(self, entry: Entry) -> list[Tensor]:
        """The parameter's shards in the order of their ranks, on the first rank."""
        if self._last[0] == entry.parameter:
            return self._last[1]
        shards: list[Tensor] = []
        for holder in self._holders(entry):
            if holder == self.rank == 0:
                shards.append(self.parameters[entry.parameter])
            elif self.rank == 0:
                shard = torch.empty(self.shapes[entry.parameter], dtype=self.dtype, device=self.device)
                torch.distributed.recv(shard, src=holder)
                shards.append(shard)
            elif holder == self.rank:
                torch.distributed.send(self.parameters[entry.parameter].contiguous(), dst=0)
        self._last = (entry.parameter, shards)
        return shards

    def _holders(self, entry: Entry) -> list[int]:
        """Ranks of one set of shards: the first replica's."""
        return [ranks[0] for ranks in holders(entry, self.description, self.sizes, self.world)]
