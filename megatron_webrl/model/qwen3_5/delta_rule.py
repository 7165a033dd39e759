"""The gated delta rule (Gated Delta Networks, arXiv 2412.06464) and the short convolution, over packed samples.

Each head has a state S [key dim, value dim], zero at the start of a sample, and computes for token t

    S_t = a_t (I - b_t k_t k_t^T) S_(t-1) + b_t k_t v_t^T        o_t = S_t^T q_t

with decay a_t in (0, 1) and writing strength b_t in (0, 1). `gated_delta_rule` evaluates it in chunks.
With g_t the logarithm of the decays' product from the start of the chunk to t, and S the state before it, the values
that a chunk writes are

    U = (I + L)^-1 diag(b) (V - diag(exp g) K S),   L_ij = b_i exp(g_i - g_j) k_i.k_j for j < i, otherwise 0

and its outputs and the state after it are

    O = diag(exp g) Q S + M U,   M_ij = exp(g_i - g_j) q_i.k_j for j <= i, otherwise 0
    S' = exp(g_C) S + sum_j exp(g_C - g_j) k_j u_j^T

Chunks begin at the first token of a sample, so neither state nor convolution depends on another sample. The states of
all samples advance together: first over the first chunk of each, then over the second of those that have one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import conv1d

from megatron_webrl.model.host_copy import copy_to_device

CHUNK = 64  # tokens

DeltaRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[int]], Tensor]
"""Arguments and result of `gated_delta_rule`."""


def choose_rule(value: Tensor, fused: bool) -> DeltaRule:
    """With `fused` the kernels of flash-linear-attention where it is installed: in half precision on CUDA."""
    half = value.is_cuda and value.dtype in (torch.bfloat16, torch.float16)
    return fused_gated_delta_rule if fused and half and importlib.util.find_spec("fla") else gated_delta_rule


def fused_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, boundaries: Sequence[int]
) -> Tensor:
    """`gated_delta_rule` by flash-linear-attention, whose products are in the dtype of `value`."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    inputs = (x[None] for x in (query, key, value, log_decay, strength))
    starts = _starts(tuple(boundaries), value.device)
    output, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=starts, use_qk_l2norm_in_kernel=True)
    return output[0]


@lru_cache(maxsize=4)  # all layers of a micro-batch ask for the same
def _starts(boundaries: tuple[int, ...], device: torch.device) -> Tensor:
    return copy_to_device(torch.tensor(boundaries), device)


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, strength: Tensor, boundaries: Sequence[int]
) -> Tensor:
    """Outputs [T, heads, value dim] in the dtype of `value`, computed in float32.

    `query`, `key`: [T, heads, key dim], normalised here; queries are scaled by key dim ** -0.5. `value`: [T, heads,
    value dim]. `log_decay` (at most 0) and `strength`: [T, heads]. `boundaries`: [samples + 1], first token of each
    sample, then T.
    """
    tokens, rounds = _chunk_places(tuple(boundaries), value.device)
    slots = sum(rounds) * CHUNK

    def by_chunk(x: Tensor) -> Tensor:
        """[chunks, heads, CHUNK, ...] from [T, heads, ...], zero after the end of a sample."""
        padded = x.new_zeros(slots, *x.shape[1:], dtype=torch.float32).index_copy(0, tokens, x.float())
        return padded.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q = by_chunk(_unit(query)) * query.shape[-1] ** -0.5
    k, v, b = by_chunk(_unit(key)), by_chunk(value), by_chunk(strength)[..., None]
    g = by_chunk(log_decay).cumsum(dim=-1)[..., None]  # [chunks, heads, CHUNK, 1]
    # The mask before the exponential: above the diagonal the difference is positive and could overflow.
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(diagonal=1)
    decays = (g - g.mT).masked_fill(above, -torch.inf).exp()
    lower = (b * (k @ k.mT) * decays).tril(diagonal=-1)
    # Both terms of U: one from the values, one to be multiplied by the state.
    written, read = torch.linalg.solve_triangular(
        lower, torch.cat([b * v, b * g.exp() * k], dim=-1), upper=False, unitriangular=True
    ).split([v.shape[-1], k.shape[-1]], dim=-1)
    within, entering = (q @ k.mT) * decays, q * g.exp()
    last = g[..., -1:, :]
    leaving = (k * (last - g).exp()).mT
    outputs, state = [], v.new_zeros(rounds[0], v.shape[1], k.shape[-1], v.shape[-1])
    # `split`: the gradient of a slice would be as large as the whole, for each slice.
    parts = (x.split(rounds) for x in (written, read, entering, within, last.exp(), leaving))
    for writes, reads, enters, inside, kept, leaves in zip(*parts, strict=True):
        state = state[: len(writes)]
        update = writes - reads @ state
        outputs.append(enters @ state + inside @ update)
        state = kept * state + leaves @ update
    flat = torch.cat(outputs).transpose(1, 2).flatten(0, 1)  # [chunks * CHUNK, heads, value dim]
    return flat.index_select(0, tokens).to(value.dtype)


@lru_cache(maxsize=4)
def _chunk_places(boundaries: tuple[int, ...], device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
    """Place of each token among the tokens of all chunks: int64 [T], and how many samples have an n-th chunk.

    Chunks are ordered by their number within the sample, then by samples, those with most chunks first.
    """
    lengths = [end - start for start, end in pairwise(boundaries)]
    chunks = [-(-length // CHUNK) for length in lengths]
    rounds = tuple(sum(count > number for count in chunks) for number in range(max(chunks)))
    firsts = list(accumulate(rounds, initial=0))
    place = {sample: n for n, sample in enumerate(sorted(range(len(chunks)), key=lambda s: -chunks[s]))}
    places = [
        (firsts[token // CHUNK] + place[sample]) * CHUNK + token % CHUNK
        for sample, length in enumerate(lengths)
        for token in range(length)
    ]
    return copy_to_device(torch.tensor(places), device), rounds


def _unit(vectors: Tensor) -> Tensor:
    """float32, divided by the square root of the sum of squares plus 1e-6, as in the released models' code."""
    wide = vectors.float()
    return wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)


def short_convolution(channels: Tensor, weight: Tensor, boundaries: Sequence[int]) -> Tensor:
    """Causal convolution of each channel within each sample: [T, C] from [T, C].

    `weight`: [C, 1, kernel], the last entry is for the token itself. `boundaries` as in `gated_delta_rule`.
    """
    before = weight.shape[-1] - 1  # zeros before each sample
    tokens = _padded_places(tuple(boundaries), before, channels.device)
    length = channels.shape[0] + before * (len(boundaries) - 1)
    padded = channels.new_zeros(length, channels.shape[1]).index_copy(0, tokens, channels)
    output = conv1d(padded.t()[None], weight, groups=channels.shape[1])[0].t()
    return output.index_select(0, tokens - before)


@lru_cache(maxsize=4)
def _padded_places(boundaries: tuple[int, ...], before: int, device: torch.device) -> Tensor:
    """Place of each token if `before` zeros precede each sample: int64 [T]."""
    places = [
        token + before * (sample + 1) for sample, ends in enumerate(pairwise(boundaries)) for token in range(*ends)
    ]
    return copy_to_device(torch.tensor(places), device)
