"""Fill a model from a Hugging Face checkpoint, reading only this rank's slices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_webrl.model.convert.hf_files import LoadError, open_hf_model
from megatron_webrl.model.parameter_map import to_megatron
from megatron_webrl.model.qwen3_vl.model import Qwen3VL

__all__ = ["LoadError", "load_hf"]


def load_hf(chunks: Sequence[Qwen3VL], folder: str | Path) -> None:
    """Copy the folder's tensors into this rank's model chunks, converting to the model's type.

    Experts may be stored in any form that `parameter_map.ExpertFormat` names. Everything is checked before the first
    weight changes: a tensor too many, one missing, or one of a wrong shape raises LoadError. Each rank reads for
    itself; nothing is communicated.
    """
    with open_hf_model(folder, chunks[0].hf_config) as source:
        for chunk in chunks:
            parameters, groups = chunk.canonical_parameters(), chunk.pg_collection
            for entry in source.mappings:
                if entry.megatron_param in parameters:
                    group = groups.tp if entry.expert is None else groups.expt_tp
                    rank, size = get_pg_rank(group), get_pg_size(group)
                    to_megatron(entry, source.tensors[entry.hf_param], parameters[entry.megatron_param], rank, size)
