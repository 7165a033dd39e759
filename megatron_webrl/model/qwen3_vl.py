"""Qwen3-VL on megatron-core: transformers' vision tower, Megatron's GPT blocks, logits where they are needed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_pg_size
from torch import Tensor

from megatron_webrl.model import vision
from megatron_webrl.model.inputs import PackedRow
from megatron_webrl.model.layers import RowParams, block_spec
from megatron_webrl.model.parameter_map import Entry, model_map, padded_vocabulary
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.rope import InterleavedRotaryEmbedding

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Qwen3VL(GPTModel):
    """The model, or the part of it that one pipeline stage holds. Made by `build`.

    Do not cast it to another type (nor wrap it in Float16Module): parameters have their type from the start.
    """

    def __init__(
        self,
        description: Any,
        config: TransformerConfig,
        platform: Platform,
        groups: ProcessGroupCollection,
        *,
        pre_process: bool = True,
        post_process: bool = True,
    ) -> None:
        text = description.text_config
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(config, groups),
            vocab_size=padded_vocabulary(text.vocab_size, get_pg_size(groups.tp)),
            max_sequence_length=text.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=description.tie_word_embeddings,
            position_embedding_type="none",
            scatter_embedding_sequence_parallel=False,
            pg_collection=groups,
        )
        self.description = description
        self.entries: tuple[Entry, ...] = model_map(description)
        self.unpadded_vocab_size: int = text.vocab_size
        self.merge: int = description.vision_config.spatial_merge_size
        self.rotary_pos_emb = InterleavedRotaryEmbedding(text.head_dim, text.rope_parameters["rope_theta"])
        self.mrope_section = text.rope_parameters["mrope_section"]
        if pre_process:
            self.visual = vision.build_tower(description.vision_config, config.params_dtype, platform.device)

    def forward(self, row: PackedRow) -> Tensor:
        """Logits [R, padded vocabulary / tensor-parallel size] at the positions `row.predict`.

        A stage before the last returns its activations [T, 1, hidden]. Collective over the tensor-parallel group.
        Raises ValueError for a row whose samples, placeholders and images do not fit together.
        """
        features = vision.encode(self.visual, row, self.merge) if self.pre_process else None
        params = self._row_params(row, features)
        hidden = self.decoder(
            hidden_states=self._embed(row, params, features) if self.pre_process else None,
            attention_mask=None,
            rotary_pos_emb=self.rotary_pos_emb(row.positions[:, None], self.mrope_section),
            packed_seq_params=params,
        )
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden.index_select(0, row.predict), weight=weight)
        return logits.squeeze(1)

    def _row_params(self, row: PackedRow, features: vision.VisualFeatures | None) -> RowParams:
        boundaries = tuple(row.cu_seqlens.tolist())
        rising = all(a < b for a, b in pairwise(boundaries))
        if boundaries[0] != 0 or boundaries[-1] != row.tokens.numel() or not rising:
            raise ValueError(
                f"row.cu_seqlens={list(boundaries)} must rise from 0 to the row's {row.tokens.numel()} tokens"
            )
        positions = self._placeholders(row) if self.pre_process else None
        found = 0 if positions is None else positions.numel()
        made = 0 if features is None else features.embeddings.shape[0]
        if found != made:
            raise ValueError(
                f"the row has {found} placeholders (token {self.description.image_token_id}), "
                f"but its {row.grids.shape[0]} images make {made} image tokens"
            )
        return RowParams(
            qkv_format="sbhd",
            cu_seqlens_q=row.cu_seqlens,
            cu_seqlens_kv=row.cu_seqlens,
            boundaries=boundaries,
            visual_positions=positions,
            deepstack=() if features is None else features.deepstack,
        )

    def _placeholders(self, row: PackedRow) -> Tensor:
        """int64 [V], row positions that image features fill."""
        if row.visual is not None:
            return row.visual
        return (row.tokens == self.description.image_token_id).nonzero().squeeze(1)

    def _embed(self, row: PackedRow, params: RowParams, features: vision.VisualFeatures | None) -> Tensor:
        """[T, 1, hidden]: token embeddings, with image features in place of the placeholders'."""
        embedded = self.embedding(input_ids=row.tokens[None], position_ids=None)
        if features is None:
            return embedded
        return embedded.index_copy(0, params.visual_positions, features.embeddings[:, None].to(embedded.dtype))


def build(
    folder: str | Path,
    *,
    dtype: str | torch.dtype,
    platform: Platform,
    groups: ProcessGroupCollection | None = None,
    train_vision: bool = True,
    pre_process: bool = True,
    post_process: bool = True,
) -> Qwen3VL:
    """The model that the Hugging Face folder describes, on the platform's device; its weights are arbitrary.

    Fill them with `load_hf` or from a checkpoint. `groups` defaults to Megatron's global process groups, which
    must exist. Without `train_vision` the vision tower takes no gradient.
    Raises ValueError for a model that is not a dense Qwen3-VL, or that the tensor-parallel size does not divide.
    """
    dtype = DTYPES[dtype] if isinstance(dtype, str) else dtype
    groups = groups or ProcessGroupCollection.use_mpu_process_groups()
    description = describe(folder)
    config = transformer_config(description, dtype, platform, groups)
    model = Qwen3VL(description, config, platform, groups, pre_process=pre_process, post_process=post_process)
    _mark_tensor_parallel(model)
    if pre_process and not train_vision:
        model.visual.requires_grad_(False)
    return model


def _mark_tensor_parallel(model: Qwen3VL) -> None:
    """Tell split parameters from replicated ones, as Megatron's initialisation would.

    Without the mark a slice counts as a copy, and the gradient norm leaves all ranks' slices but the first out.
    """
    parameters = dict(model.named_parameters())
    for entry in model.entries:
        if entry.layout.kind != "replicated" and entry.parameter in parameters:
            dimension = 1 if entry.layout.kind == "row" else 0
            parameters[entry.parameter].tensor_model_parallel = True
            parameters[entry.parameter].partition_dim = dimension
            parameters[entry.parameter].partition_stride = 1


def describe(folder: str | Path) -> Any:
    """The folder's Qwen3VLConfig. Raises ValueError if it is another architecture or uses what is not built here."""
    from transformers import AutoConfig

    description = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    if description.model_type != "qwen3_vl":
        raise ValueError(f"{folder} holds model_type={description.model_type!r}; only dense qwen3_vl can be trained")
    text = description.text_config
    rope = text.rope_parameters
    for name, found, wanted in (
        ("attention_bias", text.attention_bias, False),
        ("attention_dropout", text.attention_dropout, 0),
        ("hidden_act", text.hidden_act, "silu"),
        ("rope_type", rope["rope_type"], "default"),
    ):
        if found != wanted:
            raise ValueError(f"{folder}: text_config.{name}={found!r} is not supported; only {wanted!r} is")
    if sum(rope.get("mrope_section", ())) != text.head_dim // 2:
        raise ValueError(
            f"{folder}: mrope_section={rope.get('mrope_section')} must sum to head_dim / 2 = {text.head_dim // 2}"
        )
    return description


def transformer_config(
    description: Any, dtype: torch.dtype, platform: Platform, groups: ProcessGroupCollection
) -> TransformerConfig:
    """Megatron's settings for the text model. Raises ValueError if the tensor-parallel size does not divide it."""
    text, tensor_parallel = description.text_config, get_pg_size(groups.tp)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(text, name) % tensor_parallel:
            raise ValueError(f"tensor_parallel={tensor_parallel} does not divide {name}={getattr(text, name)}")
    on_cpu = platform.name == "cpu"
    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=text.intermediate_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        # Megatron sums the gradients of q and k norms over tensor-parallel ranks under this name.
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=get_pg_size(groups.pp),
        # Weights always come from a file, so none are drawn.
        perform_initialization=False,
        use_cpu_initialization=on_cpu,
        attention_backend=AttnBackend.local,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
