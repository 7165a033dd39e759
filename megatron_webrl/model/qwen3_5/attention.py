"""Attention whose output is multiplied by a gate, computed from the input as the query is."""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


class GatedAttention(SelfAttention):
    """Megatron's gated attention, with the query and the gate of each head next to each other in the projection.

    Megatron puts the gates of a group after its queries. This order is that of the released tensors, of which a rank's
    part is then one range of rows in each group.
    """

    def get_query_key_value_tensors(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """Query, key, value, gate [T, 1, heads or groups, dim] of hidden states [t, 1, hidden]."""
        projected, _ = self.linear_qkv(hidden_states)
        dim, groups = self.hidden_size_per_attention_head, self.num_query_groups_per_partition
        heads = self.num_attention_heads_per_partition // groups
        query, key, value = projected.unflatten(-1, (groups, -1)).split([2 * heads * dim, dim, dim], dim=-1)
        query, gate = query.unflatten(-1, (heads, 2, dim)).flatten(2, 3).unbind(dim=3)
        # A view would keep the whole projection for the backward pass.
        return self.q_layernorm(query), self.k_layernorm(key), value.contiguous(), gate
