"""Build a model and load its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_pg_rank, get_pg_size

from megatron_webrl.model.compute_options import ComputeOptions, LayerImplementation, MissingLibraryError
from megatron_webrl.model.convert.checkpoint_folder import LoadError
from megatron_webrl.model.convert.hf_files import open_hf_model
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.model.parameter_map import to_megatron
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.process_groups import parallel_sizes_of, rank_coordinates_of
from megatron_webrl.model.qwen3_5 import layers as qwen3_5
from megatron_webrl.model.qwen3_vl import layers as qwen3_vl
from megatron_webrl.model.vision_language.model import VisionLanguageModel
from megatron_webrl.model.vision_language.text_config import TextConfig, make_text_config

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


@dataclass(frozen=True)
class TextLayers:
    """How the layers of an architecture's text model are made."""

    make_text_config: Callable[[Any, torch.dtype, Platform, ProcessGroupCollection, ComputeOptions], TextConfig]
    block_spec: Callable[[Any, range, LayerImplementation], TransformerBlockSubmodules]
    """Specs from the text config, the chunk's layers, and how linear layers and norms are implemented."""


_QWEN3_VL = TextLayers(make_text_config, qwen3_vl.block_spec)
_QWEN3_5 = TextLayers(qwen3_5.make_text_config, qwen3_5.block_spec)
LAYERS = {"qwen3_vl": _QWEN3_VL, "qwen3_vl_moe": _QWEN3_VL, "qwen3_5": _QWEN3_5, "qwen3_5_moe": _QWEN3_5}


def build_model(
    folder: str | Path,
    *,
    dtype: str | torch.dtype,
    platform: Platform,
    groups: ProcessGroupCollection | None = None,
    options: ComputeOptions | None = None,
) -> list[VisionLanguageModel]:
    """Build this rank's model chunks from the config of a Hugging Face folder, on the platform's device.

    Returns several under a virtual pipeline, with arbitrary weights. `groups` defaults to Megatron's global process
    groups. Raises ValueError for an unknown architecture and for parallel sizes that do not divide it, and
    MissingLibraryError for layers of a Transformer Engine that does not import.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    options = options or ComputeOptions()
    if options.layers == "transformer_engine" and platform.transformer_engine_problem:
        raise MissingLibraryError(
            f"layers=transformer_engine: it is installed but does not import: {platform.transformer_engine_problem}"
        )
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    hf_config = load_hf_config(folder)
    layers = LAYERS[hf_config.model_type]
    config = layers.make_text_config(hf_config, dtype, platform, groups, options)
    sizes, stage = parallel_sizes_of(groups), rank_coordinates_of(groups).stage
    chunks = []
    for number in range(sizes.virtual):
        if sizes.virtual > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        chunk = number * sizes.pipeline + stage
        own = split_layers(hf_config.text_config.num_hidden_layers, sizes.num_chunks)[chunk]
        with torch.device(platform.device):  # Megatron names no device for the weights of routers
            spec = layers.block_spec(hf_config.text_config, own, options.layers)
            model = VisionLanguageModel(hf_config, config, spec, options, platform, groups, chunk)
        _mark_tensor_parallel(model)
        if model.pre_process and not options.train_vision:
            model.visual.requires_grad_(False)
        chunks.append(model)
    return chunks


def _mark_tensor_parallel(model: VisionLanguageModel) -> None:
    """Set Megatron's attributes of sharded parameters, which its weight initialisation would set.

    Without them the gradient norm includes only the first rank's shard. Experts sharded unlike the other layers have
    their own data-parallel groups; Megatron sets that only under expert parallelism.
    """
    parameters: dict[str, Any] = dict(model.canonical_parameters())
    sizes = parallel_sizes_of(model.pg_collection)
    own_replicas = sizes.expert > 1 or sizes.expert_tensor != sizes.tensor
    for mapping in model.mappings:
        if mapping.expert is not None and mapping.megatron_param in parameters:
            parameters[mapping.megatron_param].allreduce = not own_replicas
        if mapping.layout.kind != "replicated" and mapping.megatron_param in parameters:
            parameter = parameters[mapping.megatron_param]
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 1 if mapping.layout.kind == "row" else 0
            parameter.partition_stride = 1
