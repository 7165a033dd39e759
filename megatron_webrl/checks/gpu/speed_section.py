"""Section "speed": forward and backward pass of layers of a real size, against the device's own matrix product.

On CUDA: four layers of Qwen3-VL-8B and its vision tower, 16,384 tokens of which half belong to images, in bfloat16. On
the CPU: small layers in float32. The peak memory is compared with the estimate of `webrl placement --memory`; on the
CPU the peak is what the pass keeps for the backward pass. A group with common prefixes is timed as a prefix tree and as
separate sequences. The experts of a layer are timed together and one after the other.
"""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.checks.gpu import small_models
from megatron_webrl.checks.gpu.branches import continue_prompt, pack_tree
from megatron_webrl.checks.gpu.expert_speed import check_experts
from megatron_webrl.checks.gpu.model_section import start_process_groups
from megatron_webrl.checks.gpu.request import GpuCheckRequest
from megatron_webrl.checks.gpu.results import CheckResult, at_most, measured
from megatron_webrl.checks.gpu.timing import REPEATS, not_slower, seconds_of
from megatron_webrl.config.schema import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.compute_options import ComputeOptions, Recompute
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.placement.memory_estimate import GIB, LOGIT_CHUNK_BYTES, MemoryUse, estimate_memory
from megatron_webrl.placement.performance.cards import find_card
from megatron_webrl.trainer.data.prefix_merging import MIN_SHARED_TOKENS

SECTION = "speed"
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
MEMORY_TOLERANCE = 1.1  # times the estimate
RESPONSE = 32  # scored tokens of a sample
AROUND_IMAGE = 5  # other tokens that `make_sample` adds to an image
GROUP = 8  # samples with a common prefix, three quarters of their tokens


@dataclass(frozen=True)
class SpeedShape:
    """Layers and batch that are measured."""

    text: dict[str, Any]
    vision: dict[str, Any]
    samples: int
    tokens: int  # of a sample, half of which belong to an image
    matrix: int  # rows of the square matrices of the product


GPU = SpeedShape(
    text={
        "vocab_size": 32768, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "mrope_section": [24, 20, 20],
    },
    vision={
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "out_hidden_size": 4096, "num_position_embeddings": 2304, "deepstack_visual_indexes": [0, 1, 2],
    },
    samples=8, tokens=2048, matrix=8192,
)  # fmt: skip
CPU = SpeedShape(
    text={
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "mrope_section": [12, 10, 10],
    },
    vision={
        "depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "patch_size": 16,
        "out_hidden_size": 256, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1],
    },
    samples=2, tokens=512, matrix=1024,
)  # fmt: skip


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Time and peak memory of a pass for every recomputation, and the share of the device's product that it reaches."""
    platform = start_process_groups(request.platform)
    cuda = platform.name == "cuda"
    shape, dtype = (GPU, torch.bfloat16) if cuda else (CPU, torch.float32)
    product = matrix_product_tflops(shape.matrix, dtype, platform.device)
    card = find_card(torch.cuda.get_device_name()) if cuda else None
    peak = None if card is None else card.peak_tflops
    yield measured(SECTION, f"matrix product of {shape.matrix} rows", product, "TFLOP/s", peak)
    with tempfile.TemporaryDirectory(prefix="webrl-gpu-check-") as folder:
        description = _write_config(Path(folder), shape)
        flops = _flops(description, shape)
        packed, _ = small_models.pack(_samples(shape))
        plain = 0.0  # seconds without recomputation
        for recompute in RECOMPUTE:
            options = ComputeOptions(recompute=recompute)
            seconds, used = _measure(Path(folder), packed, options, dtype, platform)
            plain = plain or seconds
            label = f"{shape.samples * shape.tokens} tokens, recompute {recompute}"
            yield measured(SECTION, f"pass of {label}", 1000 * seconds, "ms")
            yield measured(SECTION, f"arithmetic of {label}", flops / seconds / 1e12, "TFLOP/s", product)
            if peak:
                yield measured(SECTION, f"MFU of {label}", 100 * flops / seconds / 1e12 / peak, "%", 100.0)
            estimate = _estimate(shape, recompute, dtype, description.to_dict())
            yield check_peak(label, used / GIB, estimated_bytes(estimate, cuda) / GIB)
        if cuda:
            seconds, _ = _measure(Path(folder), packed, ComputeOptions(compile_pointwise=True), dtype, platform)
            yield check_compiled(shape.samples * shape.tokens, seconds, plain)
        group = _group(shape)
        separate, tree = (
            _measure(Path(folder), pack_tree(group, shared)[0], ComputeOptions(), dtype, platform)[0]
            for shared in (shape.tokens + 1, MIN_SHARED_TOKENS)
        )
        yield check_tree(GROUP * shape.tokens, tree, separate, cuda)
    yield from check_experts(SECTION, platform.device, product)


def check_tree(tokens: int, tree: float, separate: float, cuda: bool) -> CheckResult:
    """Compare the seconds of a pass over a prefix tree with those over its separate sequences of `tokens` in all."""
    name = f"pass of a group of {GROUP}, {tokens} tokens, as a prefix tree"
    note = "slower than separate sequences: set trainer.merge_prefixes=trajectory"
    return not_slower(SECTION, name, tree, separate, note, cuda)


def check_compiled(tokens: int, compiled: float, plain: float) -> CheckResult:
    """Compare the seconds of a pass over `tokens` with compiled kernels and with plain operations; on a GPU."""
    name = f"pass of {tokens} tokens, compiled"
    return not_slower(SECTION, name, compiled, plain, "slower than plain operations: set TORCH_COMPILE_DISABLE=1", True)


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


def estimated_bytes(estimate: MemoryUse, cuda: bool) -> int:
    """The parts of the estimate that a pass uses: on the CPU those that it keeps for the backward pass."""
    if not cuda:
        return estimate.activations + estimate.images + estimate.logits - LOGIT_CHUNK_BYTES
    return estimate.total - estimate.optimizer - estimate.buffers  # no optimizer is made


def _write_config(folder: Path, shape: SpeedShape) -> Any:
    """Write config.json; returns the transformers configuration."""
    from transformers import Qwen3VLConfig

    text = {key: value for key, value in shape.text.items() if key != "mrope_section"}
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": shape.text["mrope_section"]}
    config = Qwen3VLConfig(
        text_config={**text, "max_position_embeddings": 32768, "rope_parameters": rope},
        vision_config={**shape.vision, "spatial_merge_size": small_models.MERGE, "temporal_patch_size": 2},
        image_token_id=small_models.IMAGE,
        video_token_id=small_models.VIDEO,
        vision_start_token_id=small_models.VISION_START,
        vision_end_token_id=small_models.VISION_END,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    return config


def _grid(shape: SpeedShape) -> list[int]:
    """Patches (t, h, w) of an image that makes half of a sample's tokens."""
    rows = 2 ** ((shape.tokens.bit_length() - 1) // 2)
    return [1, rows, shape.tokens // 2 * small_models.MERGE**2 // rows]


def _samples(shape: SpeedShape) -> list[small_models.Sample]:
    grid = _grid(shape)
    words = shape.tokens - shape.tokens // 2 - RESPONSE - AROUND_IMAGE
    values = 3 * 2 * shape.vision["patch_size"] ** 2
    return [
        small_models.make_sample([grid], text=words, response=RESPONSE, seed=number, patch_values=values)
        for number in range(shape.samples)
    ]


def _group(shape: SpeedShape) -> list[small_models.Sample]:
    """Samples of an image, `tokens` each, whose first three quarters are the same."""
    common = shape.tokens * 3 // 4
    values = 3 * 2 * shape.vision["patch_size"] ** 2
    words = common - shape.tokens // 2 - AROUND_IMAGE
    prefix = small_models.make_sample([_grid(shape)], text=words, response=0, seed=0, patch_values=values)
    own = shape.tokens - common - RESPONSE
    return [continue_prompt(prefix, [], text=own, response=RESPONSE, seed=1 + number) for number in range(GROUP)]


def _flops(hf_config: Any, shape: SpeedShape) -> float:
    """Floating-point operations of forward and backward pass."""
    from megatron_webrl.trainer.data.flops import FlopsEstimator

    estimator = FlopsEstimator.from_hf_config(hf_config)
    text = shape.tokens * estimator.per_token + shape.tokens * (shape.tokens + 1) / 2 * estimator.per_token_pair
    return 3 * shape.samples * (text + RESPONSE * estimator.per_scored_token + estimator.image_flops(_grid(shape)))


def _estimate(shape: SpeedShape, recompute: str, dtype: torch.dtype, description: dict[str, Any]) -> MemoryUse:
    """What `webrl placement --memory` estimates for a rank that trains these layers alone."""
    config = Config()
    config.model.dtype = str(dtype).removeprefix("torch.")
    config.trainer.recompute = recompute
    config.trainer.tokens_per_microbatch = shape.samples * shape.tokens
    config.rollout.max_new_tokens, config.rollout.max_model_len = RESPONSE, shape.tokens
    [use] = estimate_memory(config, description).trainer
    return use


def _measure(
    folder: Path, packed: PackedInput, options: ComputeOptions, dtype: torch.dtype, platform: platforms.Platform
) -> tuple[float, int]:
    """Median seconds of forward and backward pass, and peak bytes: on the CPU those kept for the backward pass."""
    from megatron_webrl.model import schedule
    from megatron_webrl.model.build import build_model
    from megatron_webrl.trainer.optimizer import wrap_ddp

    cuda = platform.name == "cuda"
    if cuda:
        gc.collect()  # the previous model is part of cycles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    chunks = build_model(folder, dtype=str(dtype).removeprefix("torch."), platform=platform, options=options)
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.normal_(std=0.02)
    wrapped = wrap_ddp(chunks)
    packed = packed.to(platform.device)

    def loss(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return logits.float().logsumexp(dim=1).sum(), {}

    def run() -> None:
        wrapped[0].zero_grad_buffer()
        schedule.forward_backward(wrapped, [packed], loss, forward_only=False)

    kept = 0 if cuda else _kept_bytes(run, wrapped[0])
    if cuda:
        seconds_of(run, platform.device)
    seconds = statistics.median(seconds_of(run, platform.device) for _ in range(REPEATS if cuda else 1))
    return seconds, torch.cuda.max_memory_allocated() - before if cuda else kept


def _kept_bytes(run: Any, model: torch.nn.Module) -> int:
    """Most bytes that are kept for the backward pass at a time, each storage once, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: dict[int, tuple[int, int]] = {}  # uses and bytes by address
    now = most = 0

    class Kept:
        """A saved tensor; its end is that of its use."""

        def __init__(self, tensor: Tensor) -> None:
            nonlocal now, most
            self.tensor, self.address = tensor, tensor.untyped_storage().data_ptr()
            uses, size = alive.get(self.address, (0, tensor.untyped_storage().nbytes()))
            alive[self.address] = (uses + 1, size)
            now += 0 if uses else size
            most = max(most, now)

        def __del__(self) -> None:
            nonlocal now
            uses, size = alive.pop(self.address)
            if uses > 1:
                alive[self.address] = (uses - 1, size)
            else:
                now -= size

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else Kept(tensor)

    def unpack(saved: Any) -> Tensor:
        return saved.tensor if isinstance(saved, Kept) else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        run()
    return most
