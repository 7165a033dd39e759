"""Section "one GPU": the trainer's model, gradients, optimizer step and checkpoint against transformers and arithmetic.

Small random models, dense, mixture of experts and with linear attention, in float32 and bfloat16, with every layer
library and attention kernel that is installed. In float32 a difference has an absolute limit; in bfloat16 the error,
against transformers in float32, is compared with the error of transformers in bfloat16. transformers computes each
sample alone; ours are packed, those with common prefixes as a prefix tree too, which linear attention cannot branch in.
"""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.checks import oracles
from megatron_webrl.checks.gpu import GpuCheckRequest
from megatron_webrl.checks.report import CheckResult, at_most, failed, skipped
from megatron_webrl.config.trainer import CheckpointConfig, OptimizerConfig
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.compute_options import ComputeOptions
from megatron_webrl.model.vision_language.packed_input import PackedInput

SECTION = "one GPU"
MODELS = {
    "dense": oracles.Shape(deepstack=(0, 1)),
    "experts": oracles.Shape(experts=4, dense_layers=(1,)),
    "linear attention": oracles.Shape(layers=oracles.QWEN3_5_LAYERS, experts=4),
}
FLOAT32_LOGITS = 1e-3  # largest difference; logits are of size one
FLOAT32_GRADIENT = 1e-3  # of the norm of a parameter's gradient
BFLOAT16_ERROR = 2.0  # times the error of transformers in bfloat16
STEP_ERROR = {torch.float32: 1e-4, torch.bfloat16: 2**-7}  # relative: rounding of the arithmetic, and of bfloat16
LEARNING_RATE, EPSILON = 0.05, 1.0  # an epsilon of one lets the step depend on the gradient's size
GROUP_SECONDS = 120.0
MIN_SHARED_TOKENS = 4  # of a common prefix of the small samples


@dataclass(frozen=True)
class Batch:
    """Samples, and their packed sequence."""

    samples: list[oracles.Sample]
    packed: PackedInput
    targets: Tensor  # int64 [R]
    label: str = ""  # at the end of the names of results


@dataclass(frozen=True)
class Outputs:
    """Results of a model for a batch."""

    logits: Tensor  # float32 [R, VOCABULARY]
    gradients: dict[str, Tensor]  # float32, by Hugging Face name


@dataclass(frozen=True)
class Variant:
    """A small model of ours: weights, type and kernels."""

    folder: Path  # of the weights
    kind: str
    dtype: torch.dtype
    platform: platforms.Platform
    options: ComputeOptions = ComputeOptions()

    @property
    def name(self) -> str:
        options = self.options
        return (
            f"{self.kind}, {text(self.dtype)}, {options.layers}, {options.attention}"
            f"{', one expert after the other' if options.experts == 'sequential' else ''}"
            f"{', recomputed' if options.recompute == 'full' else ''}"
            f"{', compiled' if options.compile_pointwise else ''}"
        )

    def load(self) -> tuple[list[Any], Any]:
        """The model in DistributedDataParallel, and its optimizer."""
        from megatron_webrl.model.build import build_model, load_hf
        from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp

        chunks = build_model(self.folder, dtype=text(self.dtype), platform=self.platform, options=self.options)
        load_hf(chunks, self.folder)
        wrapped = wrap_ddp(chunks)
        settings = OptimizerConfig(learning_rate=LEARNING_RATE, schedule="constant", warmup_fraction=0.0)
        return wrapped, make_optimizer(wrapped, settings, 2, self.dtype, EPSILON)


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Compare every variant of the model with transformers; then an optimizer step and a checkpoint of each dtype."""
    platform = start_process_groups(request.platform)
    all_batches = make_batches()
    with tempfile.TemporaryDirectory(prefix="webrl-check-gpu-") as folder:
        for kind, shape in MODELS.items():
            source = Path(folder) / kind
            model_class = type(oracles.write_model(source, shape, 0))
            batches = all_batches[:1] if shape.is_linear else all_batches
            exact: list[Outputs] = []
            for dtype in (torch.float32, torch.bfloat16):
                variant = Variant(source, kind, dtype, platform)
                try:
                    expected = [_expected(model_class, variant, batch.samples) for batch in batches]
                except Exception as error:  # such as of kernels that refuse this GPU
                    yield _failure(f"{kind}, {text(dtype)}, transformers", error)
                    break
                exact = exact or expected
                cases = list(zip(batches, exact, expected, strict=True))
                for options in _variants(platform, dtype, shape.experts > 0):
                    if isinstance(options, CheckResult):
                        yield options
                    else:
                        yield from _check_variant(replace(variant, options=options), cases)
                yield from _check_step(variant)


def make_batches() -> list[Batch]:
    """Samples without anything in common, and samples with common prefixes as a prefix tree."""
    tree = oracles.branches()
    return [_packed_samples(), Batch(tree, *oracles.pack_tree(tree, MIN_SHARED_TOKENS), ", prefix tree")]


def _packed_samples() -> Batch:
    parts = list(oracles.samples().values())
    return Batch(parts, *oracles.pack(parts))


def start_process_groups(name: str) -> platforms.Platform:
    """Activate the platform and make the process groups of a trainer of one rank."""
    platform = platforms.activate(name)
    torch.distributed.init_process_group(
        platform.backend, store=torch.distributed.HashStore(), rank=0, world_size=1,
        timeout=timedelta(seconds=GROUP_SECONDS),
    )  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes())
    return platform


def _variants(
    platform: platforms.Platform, dtype: torch.dtype, experts: bool
) -> Iterator[ComputeOptions | CheckResult]:
    """Options that can run here, and a result for each that cannot."""
    half = dtype is torch.bfloat16
    for layers, attention, library in (
        ("local", "sdpa", ""),
        ("local", "varlen", ""),
        ("local", "flash", "flash_attn"),
        ("transformer_engine", "auto", "transformer_engine"),
    ):
        name = f"{layers} layers, {attention} attention, {text(dtype)}"
        if attention in ("varlen", "flash") and not (half and platform.name == "cuda"):
            if half:
                yield skipped(SECTION, name, "computes in half precision on CUDA only")
        elif library and importlib.util.find_spec(library) is None:
            yield skipped(SECTION, name, f"the package {library} is not installed")
        else:
            yield ComputeOptions(layers=layers, attention=attention)  # type: ignore[arg-type]
            if layers == "transformer_engine":  # its weights' gradients are added to buffers in recomputed layers, too
                yield ComputeOptions(layers="transformer_engine", recompute="full")
    if platform.name == "cuda":
        yield ComputeOptions(attention="sdpa", compile_pointwise=True)
    if experts:  # the others compute them together where that is possible
        yield ComputeOptions(attention="sdpa", experts="sequential")


def _expected(model_class: Any, variant: Variant, samples: Sequence[oracles.Sample]) -> Outputs:
    """What transformers computes."""
    device = variant.platform.device
    model = model_class.from_pretrained(variant.folder, dtype=variant.dtype, local_files_only=True).to(device).eval()
    parts = [sample.to(device) for sample in samples]
    with torch.no_grad():
        logits = torch.cat([oracles.reference_logits(model, part) for part in parts]).float()
    oracles.reference_loss(model, parts).backward()
    return Outputs(logits, {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None})


# -- logits and gradients -----------------------------------------------------------------------------------------


def _check_variant(variant: Variant, cases: Sequence[tuple[Batch, Outputs, Outputs]]) -> Iterator[CheckResult]:
    """Compare each batch with what is expected in float32, and with the error of what is expected in its own type."""
    device, name = variant.platform.device, variant.name
    try:
        wrapped, _ = variant.load()
        for batch, exact, rounded in cases:
            name = variant.name + batch.label
            run = make_pass(wrapped, batch, device)
            logits = run().float()[:, : oracles.VOCABULARY]
            found = Outputs(logits, _gradients(variant.folder, wrapped[0].module))
            yield from _compare(name, variant.dtype, found, exact, rounded)
            grouped = variant.dtype is torch.bfloat16 and variant.options.experts == "auto"
            if device.type == "cuda" and (variant.kind == "dense" or grouped):
                yield check_host_syncs(name, run)
    except Exception as error:  # any failure of a kernel is a result
        yield _failure(name, error)


def _failure(name: str, error: Exception) -> CheckResult:
    return failed(SECTION, name, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")


def _compare(name: str, dtype: torch.dtype, found: Outputs, exact: Outputs, rounded: Outputs) -> Iterator[CheckResult]:
    if dtype is torch.float32:
        yield at_most(SECTION, f"logits: {name}", _largest(found.logits - exact.logits), FLOAT32_LOGITS)
        errors = [(found.gradients[key] - value).norm() / value.norm() for key, value in exact.gradients.items()]
        yield at_most(SECTION, f"gradients: {name}", float(torch.stack(errors).max()), FLOAT32_GRADIENT, "of the norm")
        return
    ours, theirs = (float((each.logits - exact.logits).square().mean().sqrt()) for each in (found, rounded))
    yield at_most(SECTION, f"logits: {name}", ours, BFLOAT16_ERROR * theirs, "rms error")
    ours, theirs = (_total_error(each.gradients, exact.gradients) for each in (found, rounded))
    yield at_most(SECTION, f"gradients: {name}", ours, BFLOAT16_ERROR * theirs, "of the norm")


def make_pass(wrapped: Sequence[Any], batch: Batch, device: torch.device) -> Callable[[], Tensor]:
    """A function that computes logits [R, vocabulary] and gradients of the packed sequence, which is on the device."""
    from megatron_webrl.model import schedule
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    placeholders = (batch.packed.tokens == oracles.IMAGE).nonzero().squeeze(1)  # which the host would wait for
    packed, targets = replace(batch.packed, image_token_positions=placeholders).to(device), batch.targets.to(device)
    weights = oracles.token_weights(len(targets)).to(device)

    def loss(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        group = wrapped[0].module.pg_collection.tp
        logprobs, _ = vocab_parallel_logprobs(logits, targets, oracles.TEMPERATURE, oracles.VOCABULARY, group)
        return (logprobs * weights).sum(), {"logits": logits.detach()}

    def run() -> Tensor:
        for chunk in wrapped:
            chunk.train()
            chunk.zero_grad_buffer()
        [result] = schedule.forward_backward(wrapped, [packed], loss, forward_only=False)
        return result["logits"]

    return run


def _gradients(folder: Path, model: Any) -> dict[str, Tensor]:
    """Gradients in the buffers, float32, by Hugging Face name."""
    from megatron_webrl.model.convert.hf_files import open_hf_model
    from megatron_webrl.model.parameter_map import from_megatron

    found: dict[str, Tensor] = {}
    parameters = model.canonical_parameters()
    with open_hf_model(folder, model.hf_config) as source:
        for mapping in source.mappings:
            gradient = parameters[mapping.megatron_param].main_grad
            whole = found.setdefault(mapping.hf_param, gradient.new_zeros(mapping.tensor_shape))
            from_megatron(mapping, [gradient], whole)
    return found


def check_host_syncs(name: str, work: Callable[[], object]) -> CheckResult:
    """A forward and backward pass must not wait for the GPU: it would idle until the host has launched the next kernel.

    Experts one after the other, as in float32, need the number of tokens of each.
    """
    syncs = host_syncs(work)
    places = ", ".join(f"{place} ({count})" for place, count in syncs.most_common(5))
    return at_most(SECTION, f"host syncs: {name}", syncs.total(), 0, "in a pass", places)


def host_syncs(work: Callable[[], object]) -> Counter[str]:
    """How often the host waits for the GPU in `work()`, by "file:line".

    PyTorch warns of its own copies and reads of results (`torch.cuda.set_sync_debug_mode`), not of waits for events.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    syncs = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    return Counter(f"{Path(each.filename).name}:{each.lineno}" for each in syncs)


# -- optimizer step and checkpoint ----------------------------------------------------------------------------------


def _check_step(variant: Variant) -> Iterator[CheckResult]:
    """An optimizer step against Adam's formula, and a checkpoint before and after it."""
    name = f"{variant.kind}, {text(variant.dtype)}"
    wrapped, optimizer = variant.load()
    make_pass(wrapped, _packed_samples(), variant.platform.device)()
    parameters = wrapped[0].module.canonical_parameters()
    before = {key: p.detach().float().clone() for key, p in parameters.items()}
    gradients = {key: p.main_grad.clone() for key, p in parameters.items()}
    yield _round_trip(variant, wrapped, optimizer, f"checkpoint before the first step: {name}")
    rate, defaults = optimizer.learning_rate, OptimizerConfig()
    clip = min(1.0, defaults.clip_norm / (optimizer.step() + 1e-6))
    errors, moves = [], []
    for key, parameter in parameters.items():
        step = clip * gradients[key]
        decay = defaults.weight_decay if parameter.dim() > 1 else 0.0
        expected = before[key] * (1 - rate * decay) - rate * step / (step.abs() + EPSILON)
        after = parameter.detach().float()
        errors.append(((after - expected).abs() / (1 + expected.abs())).max())
        moves.append(_largest(after - before[key]))
    if not max(moves) > 0:
        yield failed(SECTION, f"optimizer step: {name}", "no weight has changed")
    else:
        error = float(torch.stack(errors).max())  # NaN if there is one
        yield at_most(SECTION, f"optimizer step: {name}", error, STEP_ERROR[variant.dtype], "relative")
    yield _round_trip(variant, wrapped, optimizer, f"checkpoint: {name}")
    yield _round_trip(variant, wrapped, optimizer, f"checkpoint of ranks' parts: {name}", "ranks")


def _round_trip(variant: Variant, wrapped: list[Any], optimizer: Any, name: str, shards: str = "whole") -> CheckResult:
    """Save, load into another learner, and compare weights, main weights and moments bit for bit."""
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
    from megatron_webrl.trainer.learner import Learner

    checkpoints = variant.folder / "checkpoints"
    checkpointer = Checkpointer(checkpoints, variant.folder, CheckpointConfig(optimizer_shards=shards))
    version = 1 + len(list(checkpoints.glob("version-*")))
    learner = Learner(wrapped, oracles.VOCABULARY, optimizer)
    checkpointer.start_save(learner, TrainerState(version, 0, 0, (), {}, 0))
    # Pinned memory that the save had freed would be overwritten before it is on disk.
    _ = [torch.full_like(x, 77, device="cpu", pin_memory=x.is_cuda) for x in _state(learner).values()]
    checkpointer.wait_for_save()
    if checkpointer.last_completed is None:
        return failed(SECTION, name, checkpointer.last_error or "it was not completed")
    chunks, fresh = variant.load()
    restored = Learner(chunks, oracles.VOCABULARY, fresh)
    load_learner(checkpointer.last_completed[1], restored)
    different = [key for key, value in _state(learner).items() if not torch.equal(value, _state(restored)[key])]
    note = f"{different[0]} first" if different else ""
    return at_most(SECTION, name, len(different), 0, "tensors that differ", note)


def _state(learner: Any) -> dict[str, Tensor]:
    """Weights, main weights and moments of a learner."""
    found = {f"weight {key}": p.detach() for key, p in learner.models[0].canonical_parameters().items()}
    for number, part in enumerate(learner.optimizer.parts):
        main = [p for group in part.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(main):
            found[f"main weight {number}.{index}"] = parameter.detach()
            for key, value in part.optimizer.state[parameter].items():
                if isinstance(value, Tensor):
                    found[f"{key} {number}.{index}"] = value
    return found


def text(dtype: torch.dtype) -> str:
    """ "float32" or "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _largest(difference: Tensor) -> float:
    return float(difference.abs().max())


def _total_error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the error of all gradients, relative to the norm of all."""
    error = sum(float((found[key] - value).square().sum()) for key, value in expected.items())
    return (error / sum(float(value.square().sum()) for value in expected.values())) ** 0.5
