"""Scores samples with one backend after the other and compares the results."""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console

from megatron_webrl.checks.parity.backends import BackendFailed, BackendScores, run_backend
from megatron_webrl.checks.parity.report import compare_backends, print_report, write_json
from megatron_webrl.checks.parity.samples import ParitySample, built_in_samples, read_samples
from megatron_webrl.checks.parity.scoring_process import ScoringJob
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.compute_options import (
    AttentionKernel,
    ComputeOptions,
    LayerImplementation,
    MissingLibraryError,
)
from megatron_webrl.model.hf_config import cpu_engine_obstacle, load_hf_config, read_model_config
from megatron_webrl.model.layer_split import check_divides, split_layers
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.engine import vllm_environment

DEFAULT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}  # rounding: bfloat16 near 16 are 0.06 to 0.125 apart
EXIT_OK, EXIT_MISMATCH, EXIT_BACKEND_FAILED = 0, 1, 3


@dataclass(frozen=True)
class ParityRequest:
    """Options of the parity check."""

    model: Path  # Hugging Face folder
    samples: Path | None = None  # JSONL; None: built-in samples
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    layers: str = "local"  # or "transformer_engine"
    attention: str = "auto"  # or "sdpa", "varlen", "flash"
    dtype: str = "float32"
    platform: str = "auto"
    tolerance: float | None = None  # None: DEFAULT_TOLERANCE of the dtype
    max_new_tokens: int = 32  # tokens of a response that transformers samples
    max_model_len: int = 4096  # limit of prompt and response; the long built-in sample reaches it
    vllm: bool = True
    vllm_tensor_parallel: int = 1
    timeout_seconds: float = 1800.0  # limit of each backend
    seed: int = 0
    json: Path | None = None


def check_parity(request: ParityRequest, console: Console, folders: Mapping[str, Path] | None = None) -> int:
    """Score, compare and print; returns EXIT_OK, EXIT_MISMATCH beyond the tolerance, or EXIT_BACKEND_FAILED.

    `folders`: weights of single backends, in place of request.model. Raises ConfigError for invalid input.
    """
    ranks = _ranks(request.sizes)
    max_model_len = _check(request, ranks)
    tolerance = DEFAULT_TOLERANCE[request.dtype] if request.tolerance is None else request.tolerance
    try:
        processor = Processor.load(request.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{request.model} has no processor of Qwen3-VL: {_line(error)}") from error
    if request.samples is None:
        samples = built_in_samples(processor, max_model_len, request.max_new_tokens)
    else:
        samples = read_samples(request.samples, processor, max_model_len, request.max_new_tokens)
    try:
        samples, scores = _run(request, samples, ranks, console, folders or {})
    except BackendFailed as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return EXIT_BACKEND_FAILED
    differences = compare_backends(scores, samples, processor)
    print_report(console, samples, scores, differences, tolerance)
    within_tolerance = all(each.within(tolerance) for each in differences)
    if request.json is not None:
        settings = {**_settings(request), "tolerance": tolerance, "within_tolerance": within_tolerance}
        write_json(request.json, samples, scores, differences, settings)
    console.print(
        f"{'within' if within_tolerance else 'BEYOND'} the tolerance of {tolerance:g} for {request.dtype}",
        style="green" if within_tolerance else "bold red",
    )
    return EXIT_OK if within_tolerance else EXIT_MISMATCH


def _run(
    request: ParityRequest, samples: list[ParitySample], ranks: int, console: Console, folders: Mapping[str, Path]
) -> tuple[list[ParitySample], list[BackendScores]]:
    """Run all backends in turn: transformers first, as the others score the responses that it samples."""
    scores: list[BackendScores] = []
    plan = [("transformers", 1), ("megatron", ranks)]
    if request.vllm and importlib.util.find_spec("vllm") is None:
        console.print("vLLM is not installed; skipping it")
    elif request.vllm:
        plan.append(("vllm", 1))
    with tempfile.TemporaryDirectory(prefix="webrl-parity-") as folder:
        for backend, processes in plan:
            with console.status(f"{backend}: {len(samples)} samples, {processes} processes"):
                job = _job(request, samples, folders.get(backend, request.model))
                environment = backend_environment(backend, request, processes)
                result = run_backend(backend, job, processes, environment, Path(folder) / backend)
            console.print(f"{backend}: {result.load_seconds + result.score_seconds:.1f} s")
            if result.responses:
                samples = [replace(s, response_token_ids=r) for s, r in zip(samples, result.responses, strict=True)]
            scores.append(result)
    return samples, scores


def _job(request: ParityRequest, samples: list[ParitySample], model: Path) -> ScoringJob:
    return ScoringJob(
        model=model,
        samples=tuple(samples),
        dtype=request.dtype,
        platform=request.platform,
        max_new_tokens=request.max_new_tokens,
        seed=request.seed,
        sizes=request.sizes,
        compute_options=_compute_options(request),
        vllm_tensor_parallel=request.vllm_tensor_parallel,
        timeout_seconds=request.timeout_seconds,
    )


def backend_environment(backend: str, request: ParityRequest, processes: int) -> dict[str, str]:
    """Environment variables of a backend's processes, which share the cores and use no network."""
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    variables = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    if request.dtype == "float32":
        # cuDNN and Transformer Engine multiply float32 in TF32 by default, with 10 bits of mantissa.
        variables["NVIDIA_TF32_OVERRIDE"] = "0"
    if backend == "vllm":
        config = Config()
        config.model.path, config.model.platform = str(request.model), request.platform
        config.rollout.tensor_parallel = request.vllm_tensor_parallel
        config.run.startup_timeout_seconds = request.timeout_seconds
        variables = {**vllm_environment.engine_environment(config), **variables}
    return variables


def _ranks(sizes: ParallelSizes) -> int:
    """Number of Megatron processes: the fewest that hold the layout."""
    return sizes.pipeline * math.lcm(sizes.tensor, sizes.expert * sizes.expert_tensor)


def _check(request: ParityRequest, ranks: int) -> int:
    """Validate the options; returns the limit of prompt and response in tokens. Raises ConfigError."""
    text = _hf_config(request).text_config
    _compute_options(request)
    if request.dtype not in DEFAULT_TOLERANCE:
        raise ConfigError(f"--dtype={request.dtype} is not one of {', '.join(DEFAULT_TOLERANCE)}")
    if request.tolerance is not None and not request.tolerance >= 0:
        raise ConfigError(f"--tolerance={request.tolerance} must be at least 0")
    for option, value in (
        ("--max-new-tokens", request.max_new_tokens),
        ("--max-model-len", request.max_model_len),
        ("--tp", request.sizes.tensor),
        ("--pp", request.sizes.pipeline),
        ("--vpp", request.sizes.virtual),
        ("--ep", request.sizes.expert),
        ("--vllm-tp", request.vllm_tensor_parallel),
    ):
        if value < 1:
            raise ConfigError(f"{option}={value} must be at least 1")
    if not request.timeout_seconds > 0:
        raise ConfigError(f"--timeout-seconds={request.timeout_seconds:g} must be greater than 0")
    _check_layout(request.sizes, text)
    _check_devices(request, ranks)
    if request.json is not None and not request.json.absolute().parent.is_dir():
        raise ConfigError(f"--json={request.json}: the folder {request.json.absolute().parent} does not exist")
    # vLLM scores a prompt only if there is room for one more token.
    return min(request.max_model_len, int(text.max_position_embeddings) - 1)


def _hf_config(request: ParityRequest) -> Any:
    """The transformers configuration of the model. Raises ConfigError for another architecture."""
    description = read_model_config(request.model)
    on_cpu = request.platform == "cpu" or (request.platform == "auto" and not torch.cuda.is_available())
    if request.vllm and on_cpu and (obstacle := cpu_engine_obstacle(description, request.dtype)):
        raise ConfigError(f"--dtype={request.dtype}: {obstacle}; give --dtype bfloat16, or --no-vllm")
    try:
        return load_hf_config(request.model)
    except ValueError as error:
        raise ConfigError(_line(error)) from error


def _compute_options(request: ParityRequest) -> ComputeOptions:
    """Megatron's compute options. Raises ConfigError for a library that is not installed."""
    try:
        return ComputeOptions(
            layers=cast(LayerImplementation, request.layers), attention=cast(AttentionKernel, request.attention)
        )
    except MissingLibraryError as error:
        raise ConfigError(f"--{error}") from error


def _check_layout(sizes: ParallelSizes, text: Any) -> None:
    """Refuse layouts that Megatron would refuse only after transformers has loaded and scored."""
    divided = [("tensor_parallel", "--tp", sizes.tensor, key) for key in ("num_attention_heads", "num_key_value_heads")]
    if getattr(text, "num_experts", 0):
        divided.append(("expert_parallel", "--ep", sizes.expert, "num_experts"))
    elif sizes.expert > 1:
        raise ConfigError(f"--ep={sizes.expert} needs a mixture of experts; the model is dense")
    for divisor, option, size, key in divided:
        check_divides(divisor, size, key, getattr(text, key), option)
    if sizes.virtual > 1 and sizes.pipeline == 1:
        raise ConfigError(f"--vpp={sizes.virtual} needs a pipeline: --pp of at least 2")
    try:
        split_layers(text.num_hidden_layers, sizes.num_chunks)
    except ValueError as error:
        raise ConfigError(f"--pp={sizes.pipeline} --vpp={sizes.virtual}: {error}") from error


def _check_devices(request: ParityRequest, ranks: int) -> None:
    gpus = torch.cuda.device_count()
    if request.platform == "cuda" and not gpus:
        raise ConfigError("--platform=cuda, but no GPU is visible; use --platform cpu")
    if request.platform == "cpu" or not gpus:
        return
    for option, wanted in (("--tp, --pp and --ep make", ranks), ("--vllm-tp makes", request.vllm_tensor_parallel)):
        if wanted > gpus:
            raise ConfigError(
                f"{option} {wanted} ranks, one GPU each, but {gpus} GPUs are visible; use fewer, or --platform cpu"
            )


def _settings(request: ParityRequest) -> dict[str, Any]:
    return {
        "model": str(request.model),
        "sizes": asdict(request.sizes),
        "layers": request.layers,
        "attention": request.attention,
        "dtype": request.dtype,
        "platform": request.platform,
        "seed": request.seed,
    }


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
