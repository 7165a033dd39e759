"""Megatron's configuration of the text model, and the packed-sequence parameters of its layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_webrl.model.compute_options import AttentionKernel, ComputeOptions, ExpertKernel
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.model.layout import ParallelSizes, check_parallel_sizes
from megatron_webrl.model.parameter_map import is_sparse
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.process_groups import parallel_sizes_of
from megatron_webrl.model.vision_language.packed_input import SegmentKeys
from megatron_webrl.model.vision_language.rope import Rotation


@dataclass
class TextConfig(TransformerConfig):
    """Megatron's TransformerConfig with additional fields."""

    recompute_layers: bool = False
    attention_kernel: AttentionKernel = "auto"
    expert_kernel: ExpertKernel = "auto"
    compile_pointwise: bool = False


@dataclass
class MultimodalPackedSeqParams(PackedSeqParams):
    """Parameters of a packed sequence that every decoder layer needs.

    The format is "sbhd": with "thd" Megatron would restart rotary angles at each sample, but m-RoPE has one per token.
    """

    rotation: Rotation | None = None  # of this rank's tokens
    segment_boundaries: tuple[int, ...] = ()  # [segments + 1], first token of each segment, then T
    keys: SegmentKeys | None = None  # of segments, if any has a parent
    key_positions: Tensor | None = None  # int64 [keys] of `keys`, on the device
    masks: dict[int, Tensor] = field(default_factory=dict)  # by segment: [tokens, keys], where the kernel needs one
    image_token_positions: Tensor | None = None  # int64 [V], positions of image tokens among this rank's tokens
    deepstack_features: dict[int, Tensor] = field(default_factory=dict)  # by layer: [V, hidden], added to its output
    experts: dict[int, Tensor] = field(default_factory=dict)  # by layer: int16 [T, top_k] of this rank's tokens


def make_text_config(
    hf_config: Any,
    dtype: torch.dtype,
    platform: Platform,
    groups: ProcessGroupCollection,
    options: ComputeOptions,
    **architecture: Any,
) -> TextConfig:
    """Make Megatron's config of the text model. Raises ValueError if the parallel sizes do not divide it.

    `architecture`: further fields, of another architecture.
    """
    text, sizes = hf_config.text_config, parallel_sizes_of(groups)
    check_parallel_sizes(text, sizes)
    sequence_parallel = options.sequence_parallel and sizes.tensor > 1
    if getattr(text, "num_experts", 0) and sizes.tensor > 1 and not sequence_parallel:
        raise ValueError(
            f"sequence_parallel=false with tensor_parallel={sizes.tensor} cannot train a mixture of experts; "
            "set sequence_parallel=true"
        )
    return TextConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_hidden_size=getattr(text, "intermediate_size", None),  # None: no layer has a dense MLP
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,  # Megatron then sums the gradients of the q and k norms over the tensor-parallel ranks
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        perform_initialization=False,  # weights always come from a file
        use_cpu_initialization=platform.name == "cpu",
        attention_backend=AttnBackend.local,
        attention_kernel=options.attention,
        expert_kernel=options.experts,
        compile_pointwise=options.compile_pointwise,
        bias_activation_fusion=False,
        use_te_activation_func=True,  # of the layers' specs, which is swiglu.py
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=options.layers == "transformer_engine",
        gradient_accumulation_fusion=False,
        moe_token_dispatcher_type="alltoall",  # "allgather" needs inputs of equal length and rejects dense models
        tensor_model_parallel_size=sizes.tensor,
        context_parallel_size=sizes.context,
        sequence_parallel=sequence_parallel,
        **_pipeline(text, sizes, dtype),
        **_experts(text, sizes),
        **_recompute(text, options),
        **architecture,
    )


def _pipeline(text: Any, sizes: ParallelSizes, dtype: torch.dtype) -> dict[str, Any]:
    if sizes.pipeline == 1:
        return {"pipeline_dtype": dtype}
    parts = [["decoder"] * len(layers) for layers in split_layers(text.num_hidden_layers, sizes.num_chunks)]
    parts[0].insert(0, "embedding")
    parts[-1].append("loss")
    return {
        # In a virtual pipeline of two stages both neighbours are one rank: batched messages would be mixed up.
        "overlap_p2p_comm": sizes.virtual > 1,
        "batch_p2p_comm": sizes.virtual == 1,
        "pipeline_model_parallel_size": sizes.pipeline,
        "pipeline_model_parallel_layout": parts,
        "pipeline_dtype": dtype,
        "variable_seq_lengths": True,
    }


def _experts(text: Any, sizes: ParallelSizes) -> dict[str, Any]:
    sparse = [int(is_sparse(text, layer)) for layer in range(text.num_hidden_layers)]
    if not any(sparse):
        return {}
    return {
        "num_moe_experts": text.num_experts,
        "moe_layer_freq": sparse,
        "moe_ffn_hidden_size": text.moe_intermediate_size,
        "moe_router_topk": text.num_experts_per_tok,
        "moe_router_pre_softmax": False,  # softmax over the selected experts: Qwen's over all, renormalised
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
    }


def _recompute(text: Any, options: ComputeOptions) -> dict[str, Any]:
    if options.recompute == "full":
        return {"recompute_layers": True}  # Megatron's own would run the vision tower backward once per layer
    if options.recompute == "selective":
        kinds = {is_sparse(text, layer) for layer in range(text.num_hidden_layers)}
        modules = ["core_attn", *(["mlp"] if False in kinds else []), *(["moe"] if True in kinds else [])]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}
