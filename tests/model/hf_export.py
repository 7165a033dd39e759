"""The model's weights as Hugging Face tensors, gathered on the first rank one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from megatron_webrl.model.layout import replica_ranks
from megatron_webrl.model.parameter_map import ParameterMapping, from_megatron, parameter_shapes
from megatron_webrl.model.process_groups import parallel_sizes_of
from megatron_webrl.model.qwen3_vl.model import Qwen3VL


def hf_manifest(chunks: Sequence[Qwen3VL]) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and type name ("float32", "bfloat16") of every Hugging Face tensor, in the order of `hf_tensors`."""
    model = chunks[0]
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    return list(dict.fromkeys((entry.hf_param, entry.tensor_shape, dtype) for entry in model.mappings))


def hf_tensors(chunks: Sequence[Qwen3VL]) -> Iterator[tuple[str, Tensor]]:
    """Every Hugging Face tensor with its name, on the first rank; on the others nothing.

    Collective over all ranks: each must run through the whole iterator. Beyond the model, the first rank holds one
    tensor and the shards of one parameter at a time. A tensor may be the model's own memory: do not write to it.
    """
    gathering = _Gathering(chunks)
    for name, entries in groupby(chunks[0].mappings, key=lambda entry: entry.hf_param):
        tensor = gathering.tensor(list(entries))
        if tensor is not None:
            yield name, tensor


class _Gathering:
    """Brings shards to the first rank."""

    def __init__(self, chunks: Sequence[Qwen3VL]) -> None:
        model = chunks[0]
        self.description, self.sizes = model.hf_config, parallel_sizes_of(model.pg_collection)
        self.dtype = model.config.params_dtype
        self.shapes = parameter_shapes(model.mappings, self.sizes.tensor, self.sizes.expert_tensor)
        self.parameters = {name: p.detach() for chunk in chunks for name, p in chunk.canonical_parameters().items()}
        self.device = next(iter(self.parameters.values())).device
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._last: tuple[str, list[Tensor]] = ("", [])  # tensors that share a parameter follow each other

    def tensor(self, entries: list[ParameterMapping]) -> Tensor | None:
        """One whole Hugging Face tensor from its entries, on the first rank."""
        whole: Tensor | None = None
        for entry in entries:
            shards = self._shards(entry)
            if self.rank != 0:
                continue
            if entry.layout.kind == "replicated" and entry.is_whole_tensor:
                return shards[0]
            if whole is None:
                whole = torch.empty(entry.tensor_shape, dtype=self.dtype, device=self.device)
            from_megatron(entry, shards, whole)
        return whole

    def _shards(self, entry: ParameterMapping) -> list[Tensor]:
        """The parameter's shards in the order of their ranks, on the first rank."""
        if self._last[0] == entry.megatron_param:
            return self._last[1]
        shards: list[Tensor] = []
        for holder in self._holders(entry):
            if holder == self.rank == 0:
                shards.append(self.parameters[entry.megatron_param])
            elif self.rank == 0:
                shard = torch.empty(self.shapes[entry.megatron_param], dtype=self.dtype, device=self.device)
                torch.distributed.recv(shard, src=holder)
                shards.append(shard)
            elif holder == self.rank:
                torch.distributed.send(self.parameters[entry.megatron_param].contiguous(), dst=0)
        self._last = (entry.megatron_param, shards)
        return shards

    def _holders(self, entry: ParameterMapping) -> list[int]:
        """Ranks of one set of shards: the first replica's."""
        return [ranks[0] for ranks in replica_ranks(entry, self.description, self.sizes, self.world)]
