"""Load a Hugging Face checkpoint into a model; each rank reads only its slices, or the first of its replicas does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_webrl.model.convert.hf_files import LoadError, open_hf_model
from megatron_webrl.model.parameter_map import to_megatron
from megatron_webrl.model.vision_language.model import VisionLanguageModel

__all__ = ["LoadError", "is_first_replica", "load_hf"]


def load_hf(chunks: Sequence[VisionLanguageModel], folder: str | Path, first_replica_only: bool = False) -> None:
    """Copy the folder's tensors into this rank's model chunks, converted to the model's dtype. No communication.

    With `first_replica_only` only parameters of which this rank has the first replica are read; the others keep their
    values until DistributedDataParallel.broadcast_params. A rank that has none opens no file with tensors.
    Takes any ExpertFormat. Raises LoadError for missing, unexpected or misshapen tensors before it changes a weight.
    """
    wanted = [
        {
            name: parameter
            for name, parameter in chunk.canonical_parameters().items()
            if not first_replica_only
            or is_first_replica(parameter, chunk.pg_collection.dp_cp, chunk.pg_collection.expt_dp)
        }
        for chunk in chunks
    ]
    if not any(wanted):
        return
    with open_hf_model(folder, chunks[0].hf_config) as source:
        for chunk, parameters in zip(chunks, wanted, strict=True):
            groups = chunk.pg_collection
            for mapping in source.mappings:
                if mapping.megatron_param in parameters:
                    group = groups.tp if mapping.expert is None else groups.expt_tp
                    rank, size = get_pg_rank(group), get_pg_size(group)
                    parameter = parameters[mapping.megatron_param]
                    to_megatron(mapping, source.tensors[mapping.hf_param], parameter, rank, size)


def is_first_replica(parameter: torch.Tensor, data_parallel: Any, expert_data_parallel: Any) -> bool:
    """Whether this rank is the one whose values of a parameter DistributedDataParallel.broadcast_params sends.

    `data_parallel`: the group with context parallelism; `expert_data_parallel`: the group of experts' parameters, which
    Megatron marks with allreduce=False.
    """
    return get_pg_rank(data_parallel if getattr(parameter, "allreduce", True) else expert_data_parallel) == 0
