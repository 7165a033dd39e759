"""What a layer of linear attention computes and keeps, for each token (model/qwen3_5/delta_net.py and delta_rule.py).

`of`: the layer's dimensions. The delta rule is computed in float32 and in chunks of CHUNK tokens; samples of many
chunks are assumed, so that the padding of the last one does not matter. Bytes were counted with
torch.autograd.graph.saved_tensors_hooks in bfloat16; a test compares them.
"""

from __future__ import annotations

from megatron_webrl.model.parameter_counts import LinearAttention

CHUNK = 64  # tokens, as in model/qwen3_5/delta_rule.py, which imports torch
CONVOLUTION_BYTES = 3  # times the size of a value: input, padded input and output
SELECTIVE_CONVOLUTION_BYTES = 4.5  # the values that enter the rule are views of it, too
GATED_NORM_BYTES = 16.5  # of a value: input and unit in float32, the gate, and what they are multiplied to


def saved_bytes(of: LinearAttention, size: int, keeps_rule: bool) -> float:
    """Bytes saved for the backward pass, `size` of a value, without the norms and the input of the layer.

    `keeps_rule`: what the delta rule saves; without it, recomputed, its inputs.
    """
    convolution = CONVOLUTION_BYTES if keeps_rule else SELECTIVE_CONVOLUTION_BYTES
    rule = rule_bytes(of, size) if keeps_rule else rule_inputs(of, size)
    return convolution * size * of.channels + GATED_NORM_BYTES * of.value_width + rule


def rule_bytes(of: LinearAttention, size: int) -> float:
    """Bytes that the delta rule saves, its inputs included: float32 but for queries, keys and values."""
    keys = of.value_heads * of.key_dim  # each value head has a query and a key of its own
    matrices = 6.2 * CHUNK  # of a head: products of keys, decays, the triangular system, masks
    state = of.key_dim * of.value_dim / CHUNK
    return (2 * size + 48) * keys + (size + 16) * of.value_width + 4 * of.value_heads * (matrices + state)


def rule_inputs(of: LinearAttention, size: int) -> float:
    """Bytes of the inputs of the delta rule: queries, keys, values, decays and strengths."""
    return size * (2 * of.value_heads * of.key_dim + of.value_width) + 8 * of.value_heads


def state_bytes(of: LinearAttention, size: int) -> int:
    """Bytes that an engine keeps for a sequence: the float32 state, and the last tokens of the convolution."""
    return 4 * of.value_heads * of.key_dim * of.value_dim + size * (of.kernel - 1) * of.channels


def rule_operations(of: LinearAttention) -> int:
    """Operations of the delta rule as it is defined: the state is read, changed and read, a product each."""
    return 6 * of.value_heads * of.key_dim * of.value_dim


def chunked_operations(of: LinearAttention) -> int:
    """Operations of the delta rule in chunks: three products with the state, and those between tokens of a chunk."""
    between = 2 * CHUNK * (2 * of.key_dim + of.value_dim) + CHUNK * (of.key_dim + of.value_dim)
    return rule_operations(of) + of.value_heads * between
