"""Layers of the text model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_webrl.model.compute_options import LayerImplementation
from megatron_webrl.model.vision_language.attention import PackedAttention, TextAttention
from megatron_webrl.model.vision_language.experts import Experts, ReplayRouter, TokenDispatcher
from megatron_webrl.model.vision_language.norm import RMSNorm
from megatron_webrl.model.vision_language.swiglu import SwiGLU
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams


class DeepStackLayer(TransformerLayer):
    """A layer that adds its DeepStack features outside the recomputed part: the vision tower runs backward once.

    It recomputes a mixture of experts itself: in Megatron's own recomputation the router would have the experts of a
    later pass.
    """

    _experts: Tensor | None = None  # int16 [T, top_k], given experts of the pass that is computed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recompute_experts = False
        if isinstance(self.mlp, MoELayer):
            self._recompute_experts, self.mlp.moe_layer_recompute = self.mlp.moe_layer_recompute, False
            local = (self.mlp.num_local_experts, self.mlp.local_expert_indices)
            self.mlp.token_dispatcher = TokenDispatcher(*local, self.config, self.pg_collection)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Output [T, 1, hidden] and context, as in TransformerLayer."""
        params: MultimodalPackedSeqParams = kwargs["packed_seq_params"]
        forward, experts = super().forward, params.experts.get(self.layer_number - 1)

        def layer(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
            self._experts = experts  # in a recomputation again: other passes have run since
            result: tuple[Tensor, Tensor | None] = forward(*args, **kwargs)
            return result

        if self.config.recompute_layers and self.training:
            output, context = checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        else:
            output, context = layer(*args, **kwargs)
        features = params.deepstack_features.get(self.layer_number - 1)
        if features is not None:
            output = output.index_add(0, params.image_token_positions, features[:, None].to(output.dtype))
        return output, context

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Output [T, 1, hidden] of the norm, the MLP or mixture of experts, and the residual connection."""
        forward, experts = super()._forward_mlp, self._experts

        def compute(hidden_states: Tensor) -> Tensor:
            if isinstance(self.mlp, MoELayer):
                self.mlp.router.router_replay.experts = experts
            output: Tensor = forward(hidden_states, *args, **kwargs)
            return output

        if self._recompute_experts and self.training:
            return checkpoint(compute, hidden_states, use_reentrant=False, preserve_rng_state=False)
        return compute(hidden_states)


@dataclass(frozen=True)
class LayerModules:
    """Module classes of a layer."""

    column: Any
    row: Any
    norm: Any


def layer_modules(implementation: LayerImplementation) -> LayerModules:
    """The module classes of an implementation."""
    if implementation == "local":
        return LayerModules(ColumnParallelLinear, RowParallelLinear, RMSNorm)
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear

    # Norms are not fused into linear layers, so parameters have the same names as with local layers.
    return LayerModules(TEColumnParallelLinear, TERowParallelLinear, TENorm)


def attention_spec(parts: LayerModules, attention: type[SelfAttention] = TextAttention) -> ModuleSpec:
    """Spec of causal attention over packed sequences."""
    submodules = SelfAttentionSubmodules(
        linear_qkv=parts.column,
        core_attention=PackedAttention,
        linear_proj=parts.row,
        q_layernorm=parts.norm,
        k_layernorm=parts.norm,
    )
    return ModuleSpec(module=attention, params={"attn_mask_type": AttnMaskType.causal}, submodules=submodules)


def layer_spec(parts: LayerModules, attention: ModuleSpec, sparse: bool) -> ModuleSpec:
    """Spec of a layer. `sparse`: whether it is a mixture of experts."""
    mlp = MLPSubmodules(linear_fc1=parts.column, linear_fc2=parts.row, activation_func=SwiGLU)
    return ModuleSpec(
        module=DeepStackLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=parts.norm,
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=parts.norm,
            mlp=_experts_spec(mlp) if sparse else ModuleSpec(module=MLP, submodules=mlp),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _experts_spec(mlp: MLPSubmodules) -> ModuleSpec:
    experts = ModuleSpec(module=Experts, submodules=mlp)
    shared = ModuleSpec(module=SharedExpertMLP, submodules=mlp)  # made if the configuration gives it a size
    submodules = MoESubmodules(experts=experts, router=ReplayRouter, shared_experts=shared)
    return ModuleSpec(module=MoELayer, submodules=submodules)
