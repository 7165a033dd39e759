"""The model on megatron-core: the vision tower of transformers, Megatron's GPT blocks, logits at scored positions."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.compute_options import ComputeOptions
from megatron_webrl.model.hf_config import rotary_dim
from megatron_webrl.model.host_copy import copy_to_device
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.model.parameter_map import ParameterMapping, canonical_name, is_sparse, padded_vocab_size
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.process_groups import parallel_sizes_of, rank_coordinates_of
from megatron_webrl.model.value_head import ValueHead
from megatron_webrl.model.vision_language import vision
from megatron_webrl.model.vision_language.output_layer import float32_logits
from megatron_webrl.model.vision_language.packed_input import PackedInput, pad_to_multiple, segment_keys, token_range
from megatron_webrl.model.vision_language.rope import InterleavedRotaryEmbedding, make_rotation
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams, TextConfig


class VisionLanguageModel(GPTModel):
    """The model or a pipeline chunk. Do not cast or wrap it in Float16Module: parameters have their final dtype."""

    def __init__(
        self,
        hf_config: Any,
        config: TextConfig,
        spec: TransformerBlockSubmodules,
        options: ComputeOptions,
        platform: Platform,
        groups: ProcessGroupCollection,
        chunk: int,
    ) -> None:
        """`spec`: of the chunk's layers. `chunk`: its index over all pipeline stages, in forward order."""
        text, sizes = hf_config.text_config, parallel_sizes_of(groups)
        layers = split_layers(text.num_hidden_layers, sizes.num_chunks)[chunk]
        super().__init__(
            config=config,
            transformer_layer_spec=spec,
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
        self.num_deepstack_layers = len(getattr(hf_config.vision_config, "deepstack_visual_indexes", ()))
        self.rotary_pos_emb = InterleavedRotaryEmbedding(rotary_dim(text), text.rope_parameters["rope_theta"])
        self.mrope_section = text.rope_parameters["mrope_section"]
        self.float32_head = options.float32_head
        self._received: Tensor | None = None
        self.value_head: ValueHead | None = None
        if self.pre_process:
            self.visual = vision.build_vision_tower(
                hf_config.vision_config, config.params_dtype, platform.device, options.compile_pointwise
            )
        if self.post_process:
            # The scored positions are selected before the output layer, so the tokens must be gathered before it.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = sizes.tensor > 1
            if options.value_head != "none":
                self.value_head = ValueHead(config.hidden_size, options.value_head == "shared")

    def canonical_parameters(self) -> dict[str, torch.nn.Parameter]:
        """This chunk's parameters by canonical name, as in the parameter map."""
        parameters: dict[str, torch.nn.Parameter] = {}
        expert = rank_coordinates_of(self.pg_collection).expert
        per_rank = (self.config.num_moe_experts or 0) // parallel_sizes_of(self.pg_collection).expert
        for name, parameter in self.named_parameters():
            parameters[canonical_name(name, self.layer_range.start, expert * per_rank)] = parameter
        if self.post_process and not self.pre_process and self.share_embeddings_and_output_weights:
            parameters["embedding.word_embeddings.weight"] = parameters.pop("output_layer.weight")
        return parameters

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor | None] | None) -> None:
        """Set the input received from the previous stage; called by Megatron's schedules."""
        self._received = input_tensor[0] if isinstance(input_tensor, list) else input_tensor

    def forward(self, packed: PackedInput) -> Tensor | tuple[Tensor, Tensor]:
        """Logits [R, padded vocabulary / tensor-parallel size] at `packed.scored_positions`, of the head's dtype.

        With a value head also values, float32 [values], at `packed.value_rows` of these.
        An earlier chunk returns the input of the next: activations [T, 1, hidden], then the DeepStack features
        [V, 1, hidden] of each remaining DeepStack layer; T and V count this rank's tokens. Collective over tensor- and
        context-parallel ranks. Raises ValueError if segments, placeholders, images or experts do not match.
        """
        packed = pad_to_multiple(packed, self._token_shards)
        boundaries, mine, device = _boundaries(packed), self._context_shard(packed), packed.tokens.device
        placeholders, cu_seqlens = self._placeholders(packed), copy_to_device(packed.cu_seqlens, device)
        keys = None if packed.parents is None else segment_keys(packed.parents.tolist(), boundaries)
        positions = self._local(placeholders, packed.tokens.numel())
        hidden, deepstack = self._embed(packed, placeholders) if self.pre_process else self._unpack(positions.numel())
        angles = self.rotary_pos_emb(packed.position_ids[:, None, mine], self.mrope_section)
        params = MultimodalPackedSeqParams(
            qkv_format="sbhd",
            rotation=make_rotation(angles, self.config.params_dtype, self.config.apply_rope_fusion),
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens if keys is None else copy_to_device(torch.tensor(keys.boundaries).int(), device),
            segment_boundaries=boundaries,
            keys=keys,
            key_positions=None if keys is None else copy_to_device(keys.positions, device),
            image_token_positions=copy_to_device(positions, device),
            deepstack_features=deepstack,
            experts=self._experts_by_layer(packed),
        )
        self.decoder.set_input_tensor(hidden)
        hidden = self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            packed_seq_params=params,
        )
        if not self.post_process:
            later = [part[:, None] for layer, part in sorted(deepstack.items()) if layer >= self.layer_range.stop]
            return torch.cat([hidden, *later]) if later else hidden
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        scored = hidden.index_select(0, packed.scored_positions - mine.start)
        if self.float32_head:
            logits = float32_logits(self.output_layer, scored.squeeze(1), weight)
        else:
            logits = self.output_layer(scored, weight=weight)[0].squeeze(1)
        if self.value_head is None:
            return logits
        assert packed.value_rows is not None, "a value head needs PackedInput.value_rows"
        return logits, self.value_head(scored.index_select(0, packed.value_rows))

    def _embed(self, packed: PackedInput, positions: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Input activations of the first layer, and DeepStack features by layer. `positions`: of all placeholders."""
        group, device = self.pg_collection.tp, packed.tokens.device
        features = vision.encode_images(
            self.visual, packed, self.merge_size, self.pg_collection.tp_cp, self.pg_collection.cp
        )
        count = 0 if features is None else features.embeddings.shape[0]
        if positions.numel() != count:
            raise ValueError(
                f"the packed input has {positions.numel()} placeholders (token {self.hf_config.image_token_id}), "
                f"but its {packed.grids.shape[0]} images make {count} image tokens"
            )
        hidden = self.embedding(input_ids=packed.tokens[None], position_ids=None)
        deepstack: tuple[Tensor, ...] = ()
        if features is not None:
            embeddings = features.embeddings[:, None].to(hidden.dtype)
            hidden = hidden.index_copy(0, copy_to_device(positions, device), embeddings)
            deepstack = features.deepstack
        hidden = hidden[self._context_shard(packed)]
        if self.config.sequence_parallel:
            hidden = scatter_to_sequence_parallel_region(hidden, group=group)
            # Each rank uses different features: the backward pass sums their gradients.
            deepstack = tuple(copy_to_tensor_model_parallel_region(f, group=group) for f in deepstack)
        if self._token_shards > 1:
            local = self._is_local(positions, packed.tokens.numel()).nonzero().squeeze(1)
            deepstack = tuple(features.index_select(0, copy_to_device(local, device)) for features in deepstack)
        return hidden, dict(enumerate(deepstack))

    def _unpack(self, visual: int) -> tuple[Tensor, dict[int, Tensor]]:
        """Split the received tensor into activations and DeepStack features of `visual` tokens each."""
        received = self._received
        assert received is not None, "a later pipeline stage needs the output of the previous stage"
        layers = range(self.layer_range.start, self.num_deepstack_layers) if visual else range(0)
        tokens = received.shape[0] - visual * len(layers)
        hidden, *features = received.split([tokens, *[visual] * len(layers)])
        hidden = hidden.clone() if features else hidden  # not a view: the decoder may write into it
        return hidden, {layer: part.squeeze(1) for layer, part in zip(layers, features, strict=True)}

    def _placeholders(self, packed: PackedInput) -> Tensor:
        """int64 [V] on the host, positions of the image placeholders in the packed sequence."""
        if packed.image_token_positions is not None:
            return packed.image_token_positions
        return (packed.tokens == self.hf_config.image_token_id).nonzero().squeeze(1).cpu()

    def _experts_by_layer(self, packed: PackedInput) -> dict[int, Tensor]:
        """The given experts of this rank's tokens, int16 [T, top_k] for each sparse layer; {} if there are none."""
        if packed.experts is None:
            return {}
        text, tokens = self.hf_config.text_config, packed.tokens.numel()
        sparse = [layer for layer in range(text.num_hidden_layers) if is_sparse(text, layer)]
        expected = [tokens, len(sparse), text.num_experts_per_tok if sparse else 0]
        if list(packed.experts.shape) != expected:
            raise ValueError(
                f"experts has shape {list(packed.experts.shape)}, expected {expected}: tokens, MoE layers, top_k"
            )
        shard = self._token_shard(tokens)
        mine = packed.experts[shard.start : shard.stop]
        return {layer: mine[:, index] for index, layer in enumerate(sparse)}

    @property
    def _token_shards(self) -> int:
        """Number of ranks over which tokens are sharded between the tensor-parallel parts of a layer."""
        split = get_pg_size(self.pg_collection.tp) if self.config.sequence_parallel else 1
        return split * get_pg_size(self.pg_collection.cp)

    def _context_shard(self, packed: PackedInput) -> slice:
        """This context-parallel rank's tokens of a padded input."""
        group = self.pg_collection.cp
        shard = token_range(packed.tokens.numel(), get_pg_rank(group), get_pg_size(group))
        return slice(shard.start, shard.stop)

    def _token_shard(self, tokens: int) -> range:
        """This rank's tokens of a padded input under context and sequence parallelism."""
        groups = self.pg_collection
        rank, ranks = get_pg_rank(groups.cp), get_pg_size(groups.cp)
        if self.config.sequence_parallel:
            rank, ranks = rank * get_pg_size(groups.tp) + get_pg_rank(groups.tp), self._token_shards
        return token_range(tokens, rank, ranks)

    def _is_local(self, positions: Tensor, tokens: int) -> Tensor:
        """bool [V]: whether each image token is one of this rank's tokens."""
        shard = self._token_shard(tokens)
        return (positions >= shard.start) & (positions < shard.stop)

    def _local(self, positions: Tensor, tokens: int) -> Tensor:
        """Positions of this rank's image tokens, relative to its first token."""
        return positions[self._is_local(positions, tokens)] - self._token_shard(tokens).start


def _boundaries(packed: PackedInput) -> tuple[int, ...]:
    boundaries = tuple(packed.cu_seqlens.tolist())
    rising = all(a < b for a, b in pairwise(boundaries))
    if boundaries[0] != 0 or boundaries[-1] != packed.tokens.numel() or not rising:
        tokens = packed.tokens.numel()
        raise ValueError(f"cu_seqlens={list(boundaries)} must rise from 0 to the number of tokens, {tokens}")
    return boundaries
