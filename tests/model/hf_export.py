"""Gather a model's weights as Hugging Face tensors on the first rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.model.layout import replica_ranks
from megatron_webrl.model.parameter_map import from_megatron
from megatron_webrl.model.process_groups import parallel_sizes_of
from megatron_webrl.model.vision_language.model import VisionLanguageModel


def hf_tensors(chunks: Sequence[VisionLanguageModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield every Hugging Face tensor with its name on the first rank, nothing on the others.

    Collective over all ranks: each must iterate.
    """
    model, rank, ranks = chunks[0], torch.distributed.get_rank(), torch.distributed.get_world_size()
    mine = {name: p.detach().clone() for chunk in chunks for name, p in chunk.canonical_parameters().items()}
    everyone: list[Any] = [None] * ranks
    torch.distributed.gather_object(mine, everyone if rank == 0 else None)
    if rank:
        return
    sizes = parallel_sizes_of(model.pg_collection)
    for name, mappings in groupby(model.mappings, key=lambda mapping: mapping.hf_param):
        whole: Tensor | None = None
        for mapping in mappings:
            # The first replica of each shard.
            holders = [replicas[0] for replicas in replica_ranks(mapping, model.hf_config, sizes, ranks)]
            whole = torch.empty(mapping.tensor_shape, dtype=model.config.params_dtype) if whole is None else whole
            from_megatron(mapping, [everyone[holder][mapping.megatron_param] for holder in holders], whole)
        assert whole is not None
        yield name, whole
