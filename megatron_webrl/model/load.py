"""Load a Hugging Face checkpoint into a model; each rank reads only its slices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_webrl.model.convert.hf_files import LoadError, open_hf_model
from megatron_webrl.model.parameter_map import to_megatron
from megatron_webrl.model.qwen3_vl.model import Qwen3VL

__all__ = ["LoadError", "load_hf"]


def load_hf(chunks: Sequence[Qwen3VL], folder: str | Path) -> None:
    """Copy the folder's tensors into this rank's model chunks, converted to the model's dtype. No communication.

    Takes any ExpertFormat. Raises LoadError for missing, unexpected or misshapen tensors before it changes a weight.
    """
    with open_hf_model(folder, chunks[0].hf_config) as source:
        for chunk in chunks:
            parameters, groups = chunk.canonical_parameters(), chunk.pg_collection
            for mapping in source.mappings:
                if mapping.megatron_param in parameters:
                    group = groups.tp if mapping.expert is None else groups.expt_tp
                    rank, size = get_pg_rank(group), get_pg_size(group)
                    parameter = parameters[mapping.megatron_param]
                    to_megatron(mapping, source.tensors[mapping.hf_param], parameter, rank, size)
