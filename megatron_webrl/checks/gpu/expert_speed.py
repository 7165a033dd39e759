"""Part of section "speed": the experts of a layer, computed together and one after the other.

On CUDA: 32 experts of Qwen3-VL-30B-A3B, a quarter of a layer's, with their share of 16,384 tokens, each of which takes
eight experts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from megatron_webrl.checks.gpu.results import CheckResult, measured
from megatron_webrl.checks.gpu.timing import REPEATS, not_slower, seconds_of
from megatron_webrl.model.vision_language.experts import grouped_linear

Products = Callable[[Tensor, Sequence[Tensor]], Tensor]


def check_experts(section: str, device: torch.device, product: float) -> Iterator[CheckResult]:
    """Compare both ways, and the former with `product`, the TFLOP/s of the device's own matrix product."""
    cuda = device.type == "cuda"
    experts, tokens, hidden, width = (32, 32768, 2048, 768) if cuda else (8, 256, 128, 96)
    dtype = torch.bfloat16 if cuda else torch.float32
    counts = torch.multinomial(torch.ones(experts), tokens, True, generator=torch.Generator().manual_seed(0)).bincount(
        minlength=experts
    )
    ends = counts.cumsum(0, dtype=torch.int32).to(device)
    first, second = (
        torch.randn(experts, *shape, dtype=dtype, device=device).mul_(0.02)
        for shape in ((2 * width, hidden), (hidden, width))
    )
    inputs = torch.randn(tokens, hidden, dtype=dtype, device=device)

    def together(values: Tensor, weights: Sequence[Tensor]) -> Tensor:
        return grouped_linear(values, ends, weights)

    def one_by_one(values: Tensor, weights: Sequence[Tensor]) -> Tensor:
        parts = values.split(counts.tolist())
        return torch.cat([linear(part, weight) for part, weight in zip(parts, weights, strict=True)])

    def run(products: Products) -> None:
        leaves = [each.detach().requires_grad_() for each in (inputs, *first, *second)]
        gate, up = products(leaves[0], leaves[1 : 1 + experts]).chunk(2, dim=-1)
        products(silu(gate) * up, leaves[1 + experts :]).sum().backward()

    def seconds(products: Products) -> float:
        run(products)
        return statistics.median(seconds_of(lambda: run(products), device) for _ in range(REPEATS))

    found, limit = seconds(together), seconds(one_by_one)
    name = f"pass of {experts} experts, {tokens} tokens, computed together"
    note = "slower than one after the other: set trainer.experts=sequential"
    yield not_slower(section, name, found, limit, note, cuda)
    flops = 3 * 2 * tokens * 3 * width * hidden
    yield measured(section, f"arithmetic of {experts} experts", flops / found / 1e12, "TFLOP/s", product)
