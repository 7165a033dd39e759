"""Section "speed": forward and backward pass of layers of a real size, against the device's own matrix product.

On CUDA: four layers of Qwen3-VL-8B and its vision tower, 16,384 tokens of which half belong to images, in bfloat16, and
two layers of 30B-A3B. The peak memory is compared with the estimate of `webrl placement --memory`. A group with common
prefixes is timed as a prefix tree and as separate sequences, experts together and one after the other. On the CPU: the
same with small layers in float32, without memory.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.checks import oracles
from megatron_webrl.checks.gpu import GpuCheckRequest
from megatron_webrl.checks.gpu_model import start_process_groups, text
from megatron_webrl.checks.report import CheckResult, at_most, measured
from megatron_webrl.config.schema import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.compute_options import ComputeOptions, Recompute
from megatron_webrl.model.parameter_counts import make_hf_config
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.placement.hardware import find_card
from megatron_webrl.placement.memory_estimate import GIB, MemoryUse, estimate_memory
from megatron_webrl.trainer.data.flops import FlopsEstimator
from megatron_webrl.trainer.data.prefix_merging import MIN_SHARED_TOKENS

SECTION = "speed"
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
MEMORY_TOLERANCE = 1.1  # times the estimate
REPEATS = 3  # timed passes, after one that is not
RESPONSE = 32  # scored tokens of a sample
AROUND_IMAGE = 5  # other tokens that `make_sample` adds to an image
GROUP = 8  # samples with a common prefix, three quarters of their tokens


@dataclass(frozen=True)
class SpeedShape:
    """The batch that is measured."""

    samples: int
    tokens: int  # of a sample, half of which belong to an image
    patch_values: int
    matrix: int  # rows of the square matrices of the product

    @property
    def grid(self) -> list[int]:
        """Patches (t, h, w) of an image that makes half of a sample's tokens."""
        rows = 2 ** ((self.tokens.bit_length() - 1) // 2)
        return [1, rows, self.tokens // 2 * oracles.MERGE**2 // rows]

    def sample(self, tokens: int, response: int, seed: int) -> oracles.Sample:
        """A sample of an image and `tokens` tokens in all."""
        words = tokens - self.tokens // 2 - response - AROUND_IMAGE
        return oracles.make_sample(
            [self.grid], text=words, response=response, seed=seed, patch_values=self.patch_values
        )

    def group(self) -> list[oracles.Sample]:
        """Samples whose first three quarters are the same."""
        common = self.tokens * 3 // 4
        prefix, own = self.sample(common, 0, 0), self.tokens - common - RESPONSE
        return [oracles.continue_prompt(prefix, [], text=own, response=RESPONSE, seed=1 + n) for n in range(GROUP)]


GPU = SpeedShape(samples=8, tokens=2048, patch_values=3 * 2 * 16 * 16, matrix=8192)
CPU = SpeedShape(samples=2, tokens=512, patch_values=3 * 2 * 4 * 4, matrix=1024)


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Time and peak memory of a pass for every recomputation, and the share of the device's product that it reaches."""
    platform = start_process_groups(request.platform)
    cuda, shape = platform.name == "cuda", GPU if platform.name == "cuda" else CPU
    card = find_card(torch.cuda.get_device_name()) if cuda else None
    peak = None if card is None else card.peak_tflops
    with tempfile.TemporaryDirectory(prefix="webrl-check-gpu-") as name:
        dense = Layers(Path(name) / "dense", "8B", 4, platform)
        product = matrix_product_tflops(shape.matrix, dense.dtype, platform.device)
        yield measured(SECTION, f"matrix product of {shape.matrix} rows", product, "TFLOP/s", peak)
        packed, _ = oracles.pack([shape.sample(shape.tokens, RESPONSE, number) for number in range(shape.samples)])
        flops, plain = _flops(dense.config, shape), 0.0  # seconds without recomputation
        for recompute in RECOMPUTE:
            seconds, used = dense.measure(packed, ComputeOptions(recompute=recompute))
            plain = plain or seconds
            label = f"{len(packed.tokens)} tokens, recompute {recompute}"
            yield measured(SECTION, f"pass of {label}", 1000 * seconds, "ms")
            yield measured(SECTION, f"arithmetic of {label}", flops / seconds / 1e12, "TFLOP/s", product)
            if peak:
                yield measured(SECTION, f"MFU of {label}", 100 * flops / seconds / 1e12 / peak, "%", 100.0)
            if cuda:
                estimate = estimated_bytes(_estimate(shape, recompute, dense))
                yield check_peak(label, used / GIB, estimate / GIB)
        if cuda:
            seconds, _ = dense.measure(packed, ComputeOptions(compile_pointwise=True))
            yield not_slower("pass, compiled", seconds, plain, "set TORCH_COMPILE_DISABLE=1", cuda)
        separate, tree = (
            dense.measure(oracles.pack_tree(shape.group(), shared)[0], ComputeOptions())[0]
            for shared in (shape.tokens + 1, MIN_SHARED_TOKENS)
        )
        label = f"pass of a group of {GROUP}, {GROUP * shape.tokens} tokens, as a prefix tree"
        yield not_slower(label, tree, separate, "set trainer.merge_prefixes=trajectory", cuda)
        experts = Layers(Path(name) / "experts", "30B-A3B", 2, platform)
        together, sequential = (
            experts.measure(packed, ComputeOptions(experts=way))[0] for way in ("auto", "sequential")
        )
        yield not_slower(
            "pass of experts, computed together", together, sequential, "set trainer.experts=sequential", cuda
        )


def not_slower(name: str, seconds: float, limit: float, remedy: str, cuda: bool) -> CheckResult:
    """Compare a pass with a slower way of computing the same; on cores, which other processes use too, no failure."""
    if not cuda:
        return measured(SECTION, name, 1000 * seconds, "ms", 1000 * limit)
    note = "" if seconds <= limit else f"slower than the plain way: {remedy}"
    return at_most(SECTION, name, 1000 * seconds, 1000 * limit, "ms", note)


def check_peak(label: str, used: float, estimate: float) -> CheckResult:
    """Compare the memory that was used with the estimate, GiB."""
    note = ""
    if used > MEMORY_TOLERANCE * estimate:
        note = "more than 10 % above the estimate: `webrl placement --memory` promises too much here"
    return at_most(SECTION, f"peak memory of {label}", used, MEMORY_TOLERANCE * estimate, "GiB", note)


def matrix_product_tflops(rows: int, dtype: torch.dtype, device: torch.device) -> float:
    """The fastest of a few products of square matrices, TFLOP/s."""
    a, b = (torch.randn(rows, rows, dtype=dtype, device=device) for _ in range(2))
    return 2 * rows**3 / min(seconds_of(lambda: a @ b, device) for _ in range(2 * REPEATS)) / 1e12


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that `work()` takes, until the device has finished it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def estimated_bytes(estimate: MemoryUse) -> int:
    """The parts of the estimate that a pass uses: no optimizer is made."""
    return estimate.total - estimate.optimizer - estimate.buffers


def _estimate(shape: SpeedShape, recompute: str, layers: Layers) -> MemoryUse:
    """What `webrl placement --memory` estimates for a rank that trains these layers alone."""
    config = Config()
    config.model.dtype = text(layers.dtype)
    config.trainer.recompute = recompute
    config.trainer.tokens_per_microbatch = shape.samples * shape.tokens
    config.rollout.max_new_tokens, config.rollout.max_model_len = RESPONSE, shape.tokens
    [use] = estimate_memory(config, layers.config.to_dict()).trainer
    return use


def _flops(hf_config: Any, shape: SpeedShape) -> float:
    """Floating-point operations of forward and backward pass."""
    estimator = FlopsEstimator.from_hf_config(hf_config)
    tokens = shape.tokens * estimator.per_token + shape.tokens * (shape.tokens + 1) / 2 * estimator.per_token_pair
    return 3 * shape.samples * (tokens + RESPONSE * estimator.per_scored_token + estimator.image_flops(shape.grid))


class Layers:
    """A few random layers of a released size with its vision tower; on the CPU those of a small model."""

    def __init__(self, folder: Path, size: str, count: int, platform: platforms.Platform) -> None:
        self.folder, self.platform, self.cuda = folder, platform, platform.name == "cuda"
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        if self.cuda:
            self.config = make_hf_config(size)
            self.config.text_config.num_hidden_layers = count
            self.config.text_config.vocab_size = 32768
            self.config.vision_config.deepstack_visual_indexes = [0, 1, 2][:count]
            self.config.image_token_id, self.config.video_token_id = oracles.IMAGE, oracles.VIDEO
            self.config.vision_start_token_id = oracles.VISION_START
            self.config.vision_end_token_id = oracles.VISION_END
        else:
            self.config = oracles.configuration(oracles.Shape(layers=2, experts=8 if "-A" in size else 0))
        self.config.save_pretrained(folder)

    def measure(self, packed: PackedInput, options: ComputeOptions) -> tuple[float, int]:
        """Median seconds of forward and backward pass, and peak bytes on CUDA."""
        from megatron_webrl.model import schedule
        from megatron_webrl.model.build import build_model
        from megatron_webrl.trainer.optimizer import wrap_ddp

        if self.cuda:
            gc.collect()  # the previous model is part of cycles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        chunks = build_model(self.folder, dtype=text(self.dtype), platform=self.platform, options=options)
        with torch.no_grad():
            for parameter in chunks[0].parameters():
                parameter.normal_(std=0.02)
        wrapped = wrap_ddp(chunks)
        packed = packed.to(self.platform.device)

        def loss(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return logits.float().logsumexp(dim=1).sum(), {}

        def run() -> None:
            wrapped[0].zero_grad_buffer()
            schedule.forward_backward(wrapped, [packed], loss, forward_only=False)

        run()
        seconds = statistics.median(seconds_of(run, self.platform.device) for _ in range(REPEATS))
        return seconds, torch.cuda.max_memory_allocated() - before if self.cuda else 0
