"""Qwen3-VL on megatron-core: transformers' vision tower, Megatron's GPT blocks, logits where they are needed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from megatron_webrl.model.compute_options import ComputeOptions
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.model.parameter_map import ParameterMapping, is_sparse, padded_vocab_size, parameter_mappings
from megatron_webrl.model.parameter_names import canonical_name
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.process_groups import parallel_sizes_of, rank_coordinates_of
from megatron_webrl.model.qwen3_vl import vision
from megatron_webrl.model.qwen3_vl.layers import block_spec
from megatron_webrl.model.qwen3_vl.packed_input import PackedInput, pad_to_multiple, token_range
from megatron_webrl.model.qwen3_vl.rope import InterleavedRotaryEmbedding
from megatron_webrl.model.qwen3_vl.text_config import MultimodalPackedSeqParams, TextConfig, make_text_config


class Qwen3VL(GPTModel):
    """The model, or one chunk of a pipeline. Made by `build`.

    Do not cast it to another type (nor wrap it in Float16Module): parameters have their type from the start.
    """

    def __init__(
        self,
        hf_config: Any,
        config: TextConfig,
        options: ComputeOptions,
        platform: Platform,
        groups: ProcessGroupCollection,
        chunk: int,
    ) -> None:
        """`chunk`: the number of this chunk over all pipeline stages, in the order that rows pass through them."""
        text, sizes = hf_config.text_config, parallel_sizes_of(groups)
        layers = split_layers(text.num_hidden_layers, sizes.num_chunks)[chunk]
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(options.layers, [is_sparse(text, layer) for layer in layers]),
            vocab_size=padded_vocab_size(text.vocab_size, sizes.tensor),
            max_sequence_length=text.max_position_embeddings,
            pre_process=chunk == 0,
            post_process=chunk == sizes.num_chunks - 1,
            share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,
            pg_collection=groups,
            vp_stage=chunk // sizes.pipeline if sizes.virtual > 1 else None,
        )
        self.hf_config = hf_config
        self.layer_range = layers
        self.mappings: tuple[ParameterMapping, ...] = parameter_mappings(hf_config)
        self.unpadded_vocab_size: int = text.vocab_size
        self.merge_size: int = hf_config.vision_config.spatial_merge_size
        self.num_deepstack_layers = len(hf_config.vision_config.deepstack_visual_indexes)
        self.rotary_pos_emb = InterleavedRotaryEmbedding(text.head_dim, text.rope_parameters["rope_theta"])
        self.mrope_section = text.rope_parameters["mrope_section"]
        self._received: Tensor | None = None
        if self.pre_process:
            self.visual = vision.build_vision_tower(hf_config.vision_config, config.params_dtype, platform.device)
        if self.post_process:
            # Positions are chosen before the output layer, so the tokens are gathered before it, too.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = sizes.tensor > 1

    def canonical_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This chunk's parameters under the names of the parameter map: layers and experts count over the model."""
        found: dict[str, torch.nn.Parameter] = {}
        expert = rank_coordinates_of(self.pg_collection).expert
        per_rank = (self.config.num_moe_experts or 0) // parallel_sizes_of(self.pg_collection).expert
        for name, parameter in self.named_parameters():
            found[canonical_name(name, self.layer_range.start, expert * per_rank)] = parameter
        if self.post_process and not self.pre_process and self.share_embeddings_and_output_weights:
            found["embedding.word_embeddings.weight"] = found.pop("output_layer.weight")
        return found

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Take what the stage before sent; called by Megatron's schedules."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, packed: PackedInput) -> Tensor:
        """Logits [R, padded vocabulary / tensor-parallel size] at the positions `row.predict`.

        A chunk before the last returns what the next one takes: its activations [T, 1, hidden], then the DeepStack
        features [V, 1, hidden] of each layer yet to come. Under sequence and context parallelism T and V are this
        rank's tokens. Collective over the tensor- and context-parallel ranks.
        Raises ValueError for a row whose samples, placeholders and images do not fit together.
        """
        packed = pad_to_multiple(packed, self._shares)
        boundaries, mine = _boundaries(packed), self._context_share(packed)
        positions = self._local(self._placeholders(packed), packed.tokens.numel())
        hidden, deepstack = self._embed(packed) if self.pre_process else self._unpack(positions.numel())
        params = MultimodalPackedSeqParams(
            qkv_format="sbhd",
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_kv=packed.cu_seqlens,
            sample_boundaries=boundaries,
            image_token_positions=positions,
            deepstack_features=deepstack,
        )
        self.decoder.set_input_tensor(hidden)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=self.rotary_pos_emb(packed.position_ids[:, None, mine], self.mrope_section),
            packed_seq_params=params,
        )
        if not self.post_process:
            later = [
                features[:, None] for layer, features in sorted(deepstack.items()) if layer >= self.layer_range.stop
            ]
            return torch.cat([hidden, *later]) if later else hidden
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.index_select(0, packed.scored_positions - mine.start), weight=weight)
        return logits.squeeze(1)

    def _embed(self, row: PackedInput) -> tuple[Tensor, dict[int, Tensor]]:
        """Activations that enter the first layer, and the DeepStack features of each layer that takes some."""
        group, positions = self.pg_collection.tp, self._placeholders(row)
        features = vision.encode_images(
            self.visual, row, self.merge_size, self.pg_collection.tp_cp, self.pg_collection.cp
        )
        made = 0 if features is None else features.embeddings.shape[0]
        if positions.numel() != made:
            raise ValueError(
                f"the row has {positions.numel()} placeholders (token {self.hf_config.image_token_id}), "
                f"but its {row.grids.shape[0]} images make {made} image tokens"
            )
        hidden = self.embedding(input_ids=row.tokens[None], position_ids=None)
        deepstack: tuple[Tensor, ...] = ()
        if features is not None:
            hidden = hidden.index_copy(0, positions, features.embeddings[:, None].to(hidden.dtype))
            deepstack = features.deepstack
        hidden = hidden[self._context_share(row)]
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=group)
            # Ranks use different features each: their gradients are added up on the way back.
            deepstack = tuple(copy_to_tensor_model_parallel_region(f, group=group) for f in deepstack)
        if self._shares > 1:
            chosen = self._chosen(positions, row.tokens.numel())
            deepstack = tuple(features[chosen] for features in deepstack)
        return hidden, dict(enumerate(deepstack))

    def _unpack(self, visual: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Activations and DeepStack features from what the chunk before sent; `visual` tokens of each feature."""
        received = self._received
        assert received is not None, "a later pipeline stage runs on what the one before sent"
        layers = range(self.layer_range.start, self.num_deepstack_layers) if visual else range(0)
        tokens = received.shape[0] - visual * len(layers)
        hidden, *features = received.split([tokens, *[visual] * len(layers)])
        # The decoder may write into its input, but not into a view of what was received.
        hidden = hidden.clone() if features else hidden
        return hidden, {layer: part.squeeze(1) for layer, part in zip(layers, features, strict=True)}

    def _placeholders(self, row: PackedInput) -> Tensor:
        """int64 [V], row positions that image features fill."""
        if row.image_token_positions is not None:
            return row.image_token_positions
        return (row.tokens == self.hf_config.image_token_id).nonzero().squeeze(1)

    @property
    def _shares(self) -> int:
        """Ranks that share a row's tokens out between the split parts of a layer."""
        split = get_pg_size(self.pg_collection.tp) if self.config.sequence_parallel else 1
        return split * get_pg_size(self.pg_collection.cp)

    def _context_share(self, row: PackedInput) -> slice:
        """This context-parallel rank's tokens of a padded row."""
        group = self.pg_collection.cp
        share = token_range(row.tokens.numel(), get_pg_rank(group), get_pg_size(group))
        return slice(share.start, share.stop)

    def _share(self, tokens: int) -> range:
        """This rank's tokens of a padded row, sequence parallelism included."""
        groups = self.pg_collection
        rank, ranks = get_pg_rank(groups.cp), get_pg_size(groups.cp)
        if self.config.sequence_parallel:
            rank, ranks = rank * get_pg_size(groups.tp) + get_pg_rank(groups.tp), self._shares
        return token_range(tokens, rank, ranks)

    def _chosen(self, positions: Tensor, tokens: int) -> Tensor:
        """bool [V]: which of the row's image tokens are among this rank's tokens."""
        share = self._share(tokens)
        return (positions >= share.start) & (positions < share.stop)

    def _local(self, positions: Tensor, tokens: int) -> Tensor:
        """Positions of image tokens among this rank's tokens."""
        return positions[self._chosen(positions, tokens)] - self._share(tokens).start


def _boundaries(row: PackedInput) -> tuple[int, ...]:
    boundaries = tuple(row.cu_seqlens.tolist())
    rising = all(a < b for a, b in pairwise(boundaries))
    if boundaries[0] != 0 or boundaries[-1] != row.tokens.numel() or not rising:
        raise ValueError(f"row.cu_seqlens={list(boundaries)} must rise from 0 to the row's {row.tokens.numel()} tokens")
    return boundaries


def build_model(
    folder: str | Path,
    *,
    dtype: str | torch.dtype,
    platform: Platform,
    groups: ProcessGroupCollection | None = None,
    options: ComputeOptions | None = None,
) -> list[Qwen3VL]:
    """This rank's chunks of the model that the Hugging Face folder describes, on the platform's device.

    Fill their weights, which are arbitrary, with `load_hf` or from a checkpoint. One chunk, or several under a
    virtual pipeline. `groups` defaults to Megatron's global process groups, which must exist.
    Raises ValueError for a model that is no Qwen3-VL, or that the parallel sizes do not divide.
    """
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    groups, options = groups or ProcessGroupCollection.use_mpu_process_groups(), options or ComputeOptions()
    description = load_hf_config(folder)
    config = make_text_config(description, dtype, platform, groups, options)
    sizes, stage = parallel_sizes_of(groups), rank_coordinates_of(groups).stage
    chunks = []
    for number in range(sizes.virtual):
        if sizes.virtual > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(number)
        model = Qwen3VL(description, config, options, platform, groups, number * sizes.pipeline + stage)
        _mark_tensor_parallel(model)
        if model.pre_process and not options.train_vision:
            model.visual.requires_grad_(False)
        chunks.append(model)
    return chunks


def _mark_tensor_parallel(model: Qwen3VL) -> None:
    """Tell split parameters from replicated ones, as Megatron's initialisation would.

    Without the mark a slice counts as a copy, and the gradient norm leaves all ranks' slices but the first out.
    Experts that are not split as the rest of the layer are have data-parallel groups of their own; Megatron sees to
    that only if they are shared out over expert-parallel ranks.
    """
    parameters: dict[str, Any] = dict(model.canonical_parameters())
    sizes = parallel_sizes_of(model.pg_collection)
    own_replicas = sizes.expert > 1 or sizes.expert_tensor != sizes.tensor
    for entry in model.mappings:
        if entry.expert is not None and entry.megatron_param in parameters:
            parameters[entry.megatron_param].allreduce = not own_replicas
        if entry.layout.kind != "replicated" and entry.megatron_param in parameters:
            parameter = parameters[entry.megatron_param]
            parameter.tensor_model_parallel = True
            parameter.partition_dim = 1 if entry.layout.kind == "row" else 0
            parameter.partition_stride = 1
