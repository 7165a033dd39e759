"""Rates of one thread of this CPU, by kernels of the shapes that a model uses, and what they predict of its passes.

Each rate is measured over a forward and a backward pass, whose operations or bytes the prediction counts together.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from megatron_webrl.config.schema import Config
from megatron_webrl.model.vision_language.attention import per_segment
from megatron_webrl.model.vision_language.layers import RMSNorm
from megatron_webrl.model.vision_language.packed_input import PackedInput, segment_keys
from megatron_webrl.model.vision_language.swiglu import swiglu
from megatron_webrl.model.vision_language.text_config import MultimodalPackedSeqParams
from megatron_webrl.placement import hardware
from megatron_webrl.placement.hardware import BYTES, GELU, LAYER_NORM, RMS_NORM, SWIGLU, VISION_ROTARY, Rates
from megatron_webrl.placement.performance.shapes import MicrobatchShape, ModelShape
from megatron_webrl.placement.performance.training import BACKWARD_ATTENTION, BACKWARD_PRODUCTS, stage_seconds
from megatron_webrl.util import child_process, torchvision_shim
from tools.cpu_prediction.step_parts import count_operations

REPEATS = 3
PRODUCTS, ATTENTION = 1 + BACKWARD_PRODUCTS, 1 + BACKWARD_ATTENTION  # operations of both passes, over the forward one's
# Values of a parameter that are read or written: cleared, added to by each micro-batch, reduced by a copy.
CLEARED, ADDED, REDUCED = 1, 3, 2
ADAM_COPIES = 4  # of gradients to the optimizer's, and of its weights back
CACHE_VALUES, LAUNCHES = 2**22, 50  # of launch_seconds


@dataclass(frozen=True)
class CpuRates:
    """Operations, or bytes of memory, per CPU second; seconds of an operation's Python."""

    products: float
    attention: float
    memory: float
    vision_products: float
    vision_attention: float
    vision_memory: float
    launch_seconds: float  # of an operation, between the kernels

    @classmethod
    def median(cls, rounds: Sequence[CpuRates]) -> CpuRates:
        """The median of each rate."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: statistics.median(getattr(each, name) for each in rounds) for name in names})


def packed_shape(packed: PackedInput) -> MicrobatchShape:
    """The shape of a micro-batch whose sequences may branch: a segment's tokens attend to those of its ancestors."""
    assert packed.parents is not None
    starts, parents = packed.cu_seqlens.tolist(), packed.parents.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    before: list[int] = []  # tokens of the ancestors of each segment; parents come first
    for parent in parents:
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
    alone = MicrobatchShape.of_sequences(lengths, len(packed.scored_positions), packed.grids.tolist())
    pairs = sum(length * earlier for length, earlier in zip(lengths, before, strict=True))
    return dataclasses.replace(alone, pairs=alone.pairs + pairs)


def measure_rates(model: ModelShape, head_dim: int, packed: PackedInput) -> CpuRates:
    """Rates of one thread for the kernels of a micro-batch. `head_dim`: of text and tower."""
    text, shape = model.text, packed_shape(packed)
    patches = int(shape.patches)
    hidden, query, key, wide = text.hidden_size, text.query_width, text.key_width, text.intermediate_size
    matrices = [(hidden, query + 2 * key), (query, hidden), (hidden, 2 * wide), (wide, hidden)]
    width = model.vision_hidden
    tower = [(width, 3 * width), (width, width), (width, model.vision_intermediate), (model.vision_intermediate, width)]
    return CpuRates(
        products=_product_rate(int(shape.tokens), matrices),
        attention=ATTENTION * 4 * shape.pairs * query / _attention_seconds(packed, query, key, head_dim),
        memory=_text_memory_rate(int(shape.tokens), hidden, wide),
        vision_products=_product_rate(patches, tower),
        vision_attention=_vision_attention_rate(packed, width, head_dim),
        vision_memory=_vision_memory_rate(patches, width, model.vision_intermediate, head_dim),
        launch_seconds=launch_seconds(),
    )


def _product_rate(rows: int, matrices: Sequence[tuple[int, int]]) -> float:
    """Of linear layers (inputs, outputs), one after the other."""
    inputs = [torch.randn(rows, width, requires_grad=True) for width, _ in matrices]
    weights = [torch.randn(outputs, width, requires_grad=True) for width, outputs in matrices]
    operations = sum(2 * rows * width * outputs for width, outputs in matrices)
    return (
        PRODUCTS
        * operations
        / _both_passes(lambda: [linear(*each) for each in zip(inputs, weights, strict=True)], [*inputs, *weights])
    )


def _attention_seconds(packed: PackedInput, query: int, key: int, head_dim: int) -> float:
    """Of one layer of the text model: masks, and keys of common prefixes put together, with it."""
    tokens, boundaries = len(packed.tokens), tuple(packed.cu_seqlens.tolist())
    shapes = [(tokens, 1, width // head_dim, head_dim) for width in (query, key, key)]
    query_heads, key_heads, value_heads = heads = [torch.randn(shape, requires_grad=True) for shape in shapes]
    assert packed.parents is not None
    keys = segment_keys(packed.parents.tolist(), boundaries)
    params = MultimodalPackedSeqParams(qkv_format="sbhd", segment_boundaries=boundaries, keys=keys)
    attend = lambda: per_segment(query_heads, key_heads, value_heads, params, None)  # noqa: E731
    return _both_passes(lambda: [attend().reshape(tokens, 1, -1)], heads)


def _vision_attention_rate(packed: PackedInput, width: int, head_dim: int) -> float:
    """Of one layer of the tower, one image after the other."""
    images = [t * h * w for t, h, w in packed.grids.tolist()]
    heads = [torch.randn(3, 1, width // head_dim, patches, head_dim, requires_grad=True) for patches in images]
    seconds = _both_passes(lambda: [scaled_dot_product_attention(*each) for each in heads], heads)
    return ATTENTION * 4 * sum(patches**2 for patches in images) * width / seconds


def _text_memory_rate(tokens: int, hidden: int, wide: int) -> float:
    """Of the two kinds of kernels that move most: norm and SwiGLU."""
    norm = make_norm(hidden)
    rows = [torch.randn(tokens, hidden, requires_grad=True) for _ in range(2)]
    inner = torch.randn(tokens, 2 * wide, requires_grad=True)
    moved = RMS_NORM * (2 * hidden) + SWIGLU * wide
    return (
        tokens
        * moved.bytes
        / _both_passes(lambda: [*(norm(each) for each in rows), swiglu(inner)], [*rows, inner, norm.weight])
    )


def make_norm(width: int) -> RMSNorm:
    """A norm of Qwen3-VL's text model, in float32 on the CPU."""
    config: Any = SimpleNamespace(
        use_cpu_initialization=True, params_dtype=torch.float32, sequence_parallel=False,
        layernorm_zero_centered_gamma=False,
    )  # fmt: skip
    return RMSNorm(config, width)


def _vision_memory_rate(patches: int, hidden: int, wide: int, head_dim: int) -> float:
    """Of the norms, rotary embeddings and activation of a block of the tower."""
    torchvision_shim.install()
    from transformers.models.qwen3_vl.modeling_qwen3_vl import apply_rotary_pos_emb_vision

    rows = [torch.randn(patches, hidden, requires_grad=True) for _ in range(2)]
    heads = [torch.randn(patches, hidden // head_dim, head_dim, requires_grad=True) for _ in range(2)]
    inner, scale = torch.randn(patches, wide, requires_grad=True), torch.ones(hidden, requires_grad=True)
    angles = torch.randn(patches, head_dim)
    moved = LAYER_NORM * (2 * hidden) + VISION_ROTARY * (2 * hidden) + GELU * wide

    def tower() -> list[Tensor]:
        norms = [layer_norm(each, (hidden,), scale, scale) for each in rows]
        rotated = apply_rotary_pos_emb_vision(*heads, angles.cos(), angles.sin())
        return [*norms, *rotated, gelu(inner, approximate="tanh")]

    return patches * moved.bytes / _both_passes(tower, [*rows, *heads, inner, scale])


def launch_seconds() -> float:
    """CPU seconds of Python, dispatch and autograd for an operation, whose own work is next to nothing.

    Those of a linear layer's two passes, each after a kernel that fills the caches with other data, as a pass's do.
    """
    filling, row, module = torch.randn(CACHE_VALUES), torch.randn(1, 8, requires_grad=True), torch.nn.Linear(8, 8)
    inputs, gradient = [row, *module.parameters()], torch.ones(1, 8)

    def kernels() -> None:
        for _ in range(2 * LAUNCHES):
            filling.mul_(1.0)

    def launches() -> None:
        for _ in range(LAUNCHES):
            filling.mul_(1.0)
            output = module(row)
            filling.mul_(1.0)
            torch.autograd.grad(output, inputs, gradient)

    operations = count_operations(lambda: torch.autograd.grad(module(row), inputs, gradient))
    return max(0.0, cpu_seconds(launches) - cpu_seconds(kernels)) / (LAUNCHES * operations)


def predict_passes(
    model: ModelShape, rates: CpuRates, shapes: Sequence[MicrobatchShape], operations: int
) -> dict[str, float]:
    """CPU seconds of forward and backward passes by part. `operations`: of PyTorch, in all passes."""
    parts: dict[str, float] = {}
    config = Config()  # one rank on the CPU in float32
    of_text = Rates.of_processor(rates.products, rates.attention, rates.memory)
    for shape in shapes:
        text = stage_seconds(config, model, of_text, shape, 0, training=True).compute
        vision = PRODUCTS * model.vision(shape) / rates.vision_products
        vision += ATTENTION * model.vision_attention(shape) / rates.vision_attention
        vision += hardware.vision_traffic(model, shape) / rates.vision_memory
        found = {name: text[name] for name in ("products", "attention", "output layer")}
        found |= {"vision": vision, "other kernels": hardware.text_traffic(model, shape) / rates.memory}
        for name, seconds in found.items():
            parts[name] = parts.get(name, 0.0) + seconds
    moved = CLEARED + REDUCED + ADDED * len(shapes)
    parts["gradients and weights"] = BYTES * moved * model.counts.total / rates.memory
    parts["between operations"] = operations * rates.launch_seconds
    return parts


def predict_optimizer(parameters: Sequence[Tensor], clip_norm: float, rates: CpuRates) -> float:
    """CPU seconds of clipping and AdamW on parameters of the given shapes, measured, and of Megatron's copies."""
    copies = [torch.nn.Parameter(torch.randn_like(each)) for each in parameters]
    for each in copies:
        each.grad = torch.randn_like(each)
    adam = torch.optim.AdamW(copies, lr=1e-5)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(copies, clip_norm)
        adam.step()

    copied = BYTES * ADAM_COPIES * sum(each.numel() for each in copies) / rates.memory
    return cpu_seconds(step) + copied + ADAM_COPIES / 2 * len(copies) * rates.launch_seconds


def _both_passes(forward: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor]) -> float:
    """CPU seconds of the kernels of `forward` and of the gradients of `inputs`."""
    gradients = [torch.randn_like(each) for each in forward()]
    return cpu_seconds(lambda: torch.autograd.grad(forward(), inputs, gradients))


def cpu_seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median CPU seconds of `repeats` calls, after one that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Result of `work` in a process of its own, which dies with this one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, child_process.die_with_parent, (signal.SIGKILL, os.getpid())) as pool:
        return pool.submit(work, *arguments).result()
