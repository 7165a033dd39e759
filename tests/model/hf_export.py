"""Gather a model's weights as Hugging Face tensors on the first rank, one tensor at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from megatron_webrl.model.layout import replica_ranks
from megatron_webrl.model.parameter_map import ParameterMapping, from_megatron, parameter_shapes
from megatron_webrl.model.process_groups import parallel_sizes_of
from megatron_webrl.model.vision_language.model import VisionLanguageModel


def hf_manifest(chunks: Sequence[VisionLanguageModel]) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype ("float32", "bfloat16") of every Hugging Face tensor, in the order of `hf_tensors`."""
    model = chunks[0]
    dtype = str(model.config.params_dtype).removeprefix("torch.")
    return list(dict.fromkeys((mapping.hf_param, mapping.tensor_shape, dtype) for mapping in model.mappings))


def hf_tensors(chunks: Sequence[VisionLanguageModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor with its name on the first rank, nothing on the others.

    Collective over all ranks: each must exhaust the iterator. A tensor may be a view of the model: do not write to it.
    """
    gatherer = _Gatherer(chunks)
    for name, mappings in groupby(chunks[0].mappings, key=lambda mapping: mapping.hf_param):
        tensor = gatherer.tensor(list(mappings))
        if tensor is not None:
            yield name, tensor


class _Gatherer:
    """Gathers shards on the first rank."""

    def __init__(self, chunks: Sequence[VisionLanguageModel]) -> None:
        model = chunks[0]
        self.hf_config, self.sizes = model.hf_config, parallel_sizes_of(model.pg_collection)
        self.dtype = model.config.params_dtype
        self.shapes = parameter_shapes(model.mappings, self.sizes.tensor, self.sizes.expert_tensor)
        self.parameters = {name: p.detach() for chunk in chunks for name, p in chunk.canonical_parameters().items()}
        self.device = next(iter(self.parameters.values())).device
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._last: tuple[str, list[Tensor]] = ("", [])  # tensors that share a parameter are adjacent

    def tensor(self, mappings: list[ParameterMapping]) -> Tensor | None:
        """A whole Hugging Face tensor from its mappings, on the first rank."""
        whole: Tensor | None = None
        for mapping in mappings:
            shards = self._shards(mapping)
            if self.rank != 0:
                continue
            if mapping.layout.kind == "replicated" and mapping.is_whole_tensor:
                return shards[0]
            if whole is None:
                whole = torch.empty(mapping.tensor_shape, dtype=self.dtype, device=self.device)
            from_megatron(mapping, shards, whole)
        return whole

    def _shards(self, mapping: ParameterMapping) -> list[Tensor]:
        """The parameter's shards in rank order, on the first rank."""
        if self._last[0] == mapping.megatron_param:
            return self._last[1]
        shards: list[Tensor] = []
        for source in self._source_ranks(mapping):
            if source == self.rank == 0:
                shards.append(self.parameters[mapping.megatron_param])
            elif self.rank == 0:
                shard = torch.empty(self.shapes[mapping.megatron_param], dtype=self.dtype, device=self.device)
                torch.distributed.recv(shard, src=source)
                shards.append(shard)
            elif source == self.rank:
                torch.distributed.send(self.parameters[mapping.megatron_param].contiguous(), dst=0)
        self._last = (mapping.megatron_param, shards)
        return shards

    def _source_ranks(self, mapping: ParameterMapping) -> list[int]:
        """Ranks of the first replica of each shard."""
        return [ranks[0] for ranks in replica_ranks(mapping, self.hf_config, self.sizes, self.world)]
