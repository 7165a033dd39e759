"""The chunked delta rule equals the recurrence that defines it, and that of transformers; samples are separate."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from megatron_webrl.model.qwen3_5.delta_net import (
    CHUNK,
    choose_rule,
    fused_gated_delta_rule,
    gated_delta_rule,
    short_convolution,
)
from megatron_webrl.util import torchvision_shim

HEADS, KEY, VALUE = 3, 12, 20
LENGTHS = {
    "one token": [1],
    "a chunk": [CHUNK],
    "chunk and one": [CHUNK + 1],
    "packed": [5, 2 * CHUNK + 3, 1, CHUNK, 40],
}


def _boundaries(lengths: list[int]) -> list[int]:
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def _inputs(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Query, key, value, decay (slow, so that the state of a chunk reaches the next) and strength."""
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(tokens, HEADS, KEY, generator=generator) for _ in range(2))
    v = torch.randn(tokens, HEADS, VALUE, generator=generator)
    decay = -0.02 * torch.rand(tokens, HEADS, generator=generator)
    strength = torch.rand(tokens, HEADS, generator=generator)
    return tuple(x.to(dtype).requires_grad_() for x in (q, k, v, decay, strength))


def _recurrence(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, boundaries: list[int]) -> Tensor:
    """The rule token by token in float64, with the matrices of the definition."""
    q, k, v, decay, strength = (x.double() for x in (q, k, v, decay, strength))
    q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    rows = []
    for start, end in pairwise(boundaries):
        state = q.new_zeros(HEADS, KEY, VALUE)
        for t in range(start, end):
            b, keys = strength[t][:, None, None], k[t][:, :, None]
            forget = torch.eye(KEY, dtype=q.dtype) - b * keys @ keys.mT
            state = decay[t].exp()[:, None, None] * forget @ state + b * keys @ v[t][:, None, :]
            rows.append((q[t][:, None, :] @ state)[:, 0] / KEY**0.5)
    return torch.stack(rows)


@pytest.mark.parametrize("lengths", list(LENGTHS.values()), ids=list(LENGTHS))
def test_outputs_and_gradients_equal_those_of_the_recurrence(lengths: list[int]) -> None:
    boundaries = _boundaries(lengths)
    inputs = _inputs(boundaries[-1])
    output, expected = gated_delta_rule(*inputs, boundaries), _recurrence(*inputs, boundaries)
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    found = torch.autograd.grad((output * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, reference in zip(found, wanted, strict=True):
        if lengths == [1] and not reference.any():
            assert not gradient.any()  # the decay of a first token acts on an empty state
            continue
        assert (gradient - reference).norm() < 1e-5 * reference.norm()


def test_the_fused_rule_hands_its_kernel_packed_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels need CUDA; here the rule of transformers takes their place, with the arguments of theirs."""
    torchvision_shim.install()
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, cu_seqlens: Tensor, use_qk_l2norm_in_kernel: bool
    ) -> tuple[Tensor, None]:
        assert use_qk_l2norm_in_kernel
        assert cu_seqlens.dtype is torch.int64
        assert q.dtype == k.dtype == v.dtype
        parts = (
            torch_chunk_gated_delta_rule(*(x[:, a:b] for x in (q, k, v, g, beta)), use_qk_l2norm_in_kernel=True)[0]
            for a, b in pairwise(cu_seqlens.tolist())
        )
        return torch.cat(list(parts), dim=1), None

    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["fla.ops.gated_delta_rule"], "chunk_gated_delta_rule", kernel, raising=False)
    boundaries = _boundaries(LENGTHS["packed"])
    inputs = [x.detach() for x in _inputs(boundaries[-1])]
    expected = gated_delta_rule(*inputs, boundaries)
    torch.testing.assert_close(fused_gated_delta_rule(*inputs, boundaries), expected, atol=1e-5, rtol=0)
    assert choose_rule(inputs[2].bfloat16(), fused=True) is gated_delta_rule  # on the CPU


def test_a_gpu_without_the_kernels_of_linear_attention_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    on_gpu = cast(Any, SimpleNamespace(is_cuda=True, dtype=torch.bfloat16))
    assert choose_rule(on_gpu, fused=False) is gated_delta_rule
    assert not caplog.messages
    assert choose_rule(on_gpu, fused=True) is gated_delta_rule  # this environment has no fla-core
    assert "fla-core" in caplog.text


def test_fast_decay_gives_finite_outputs_and_gradients() -> None:
    q, k, v, decay, strength = _inputs(3 * CHUNK)
    output = gated_delta_rule(q, k, v, decay * 5000, strength, [0, 3 * CHUNK])
    gradients = torch.autograd.grad(output.sum(), (q, k, v, decay, strength))
    assert all(x.isfinite().all() for x in (output, *gradients))


def test_half_precision_is_computed_in_single_precision() -> None:
    boundaries = _boundaries(LENGTHS["packed"])
    inputs = [x.detach() for x in _inputs(boundaries[-1], torch.bfloat16)]
    output = gated_delta_rule(*inputs, boundaries)
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, gated_delta_rule(*(x.float() for x in inputs), boundaries).bfloat16())


def test_the_convolution_sees_the_tokens_before_it_in_its_sample() -> None:
    boundaries, channels, kernel = _boundaries([2, 1, 7]), 5, 4
    generator = torch.Generator().manual_seed(6)
    x, weight = torch.randn(10, channels, generator=generator), torch.randn(channels, 1, kernel, generator=generator)
    expected = torch.zeros_like(x)
    for start, end in pairwise(boundaries):
        for t in range(start, end):
            for back in range(min(kernel, t - start + 1)):
                expected[t] += weight[:, 0, kernel - 1 - back] * x[t - back]
    torch.testing.assert_close(short_convolution(x, weight, boundaries), expected, atol=1e-6, rtol=0)
