"""`webrl check model`: do transformers, Megatron and vLLM give a checkpoint's responses the same log-probabilities?

In float32 no token may differ by more than a tolerance. In bfloat16 single tokens of a right implementation differ by a
quarter: mean and quantile of the error, against transformers in float32, are compared with those of transformers in
bfloat16.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from megatron_webrl.checks.model_scores import ModelCheckRequest, Scores, ScoringJob
from megatron_webrl.checks.processes import run_processes
from megatron_webrl.checks.report import CheckResult, at_most, failed, measured, skipped
from megatron_webrl.checks.samples import ModelSample, built_in_samples, read_samples
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.compute_options import MissingLibraryError
from megatron_webrl.model.hf_config import cpu_engine_obstacle, load_hf_config, read_model_config
from megatron_webrl.model.layer_split import check_divides, split_layers
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.engine import vllm_environment

SECTION = "model"
DTYPES = ("float32", "bfloat16")
FLOAT32_TOLERANCE = 1e-3  # of the largest difference
BFLOAT16_ERROR = 2.0  # times the error of transformers in bfloat16
QUANTILE = 0.95
EXACT = "transformers, float32"


@dataclass(frozen=True)
class Difference:
    """Absolute differences of the log-probabilities of two backends, over all scored tokens."""

    largest: float  # NaN if there is one
    mean: float
    quantile: float
    tokens: int
    worst: str  # sample, token and both log-probabilities of the largest difference


def check_model(
    request: ModelCheckRequest, console: Console, folders: Mapping[str, Path] | None = None
) -> list[CheckResult]:
    """Score and compare. `folders`: weights of single backends, in place of request.model.

    Raises ConfigError for invalid input.
    """
    max_model_len = _validate(request)
    try:
        processor = Processor.load(request.model)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{request.model} has no processor of Qwen3-VL: {_line(error)}") from error
    arguments = (processor, max_model_len, request.max_new_tokens)
    samples = read_samples(request.samples, *arguments) if request.samples else built_in_samples(*arguments)
    results: list[CheckResult] = []
    scores: dict[str, Scores] = {}
    for name, backend, dtype, ranks in _backends(request):
        if backend == "vllm" and importlib.util.find_spec("vllm") is None:
            results.append(skipped(SECTION, name, "vLLM is not installed"))
            continue
        own = replace(request, model=(folders or {}).get(backend, request.model), dtype=dtype)
        with console.status(f"{name}: {len(samples)} samples, {ranks} processes"):
            outcome = run_processes(
                f"model_scores:score_{backend}", ScoringJob(own, tuple(samples)), request.timeout_seconds,
                count=ranks, environment=backend_environment(backend, own, ranks),
            )  # fmt: skip
        if outcome.error:
            console.print(outcome.log, markup=False, style="dim")
            return [*results, failed(SECTION, name, f"{outcome.error} (--timeout-seconds={request.timeout_seconds:g})")]
        parts = [part[0] for part in outcome.results]
        scores[name] = next(part for part in parts if part.logprobs)
        if scores[name].responses:
            responses = zip(samples, scores[name].responses, strict=True)
            samples = [replace(sample, response_token_ids=response) for sample, response in responses]
        seconds = max(part.seconds for part in parts)
        for figure, value, unit in (
            ("start and load", outcome.seconds - seconds, "s"),
            ("score", seconds, "s"),
            (f"peak memory of {ranks} processes", sum(part.peak_bytes for part in parts) / 2**20, "MiB"),
        ):
            results.append(measured(SECTION, f"{name}: {figure}", value, unit))
    for sample in samples:
        size = f"{len(sample.prompt_token_ids)} + {len(sample.response_token_ids)} tokens, {len(sample.images)} images"
        results.append(measured(SECTION, f"sample {sample.name}", size))
    return [*results, *judge(scores, samples, processor, request.dtype, request.tolerance)]


def judge(
    scores: Mapping[str, Scores], samples: Sequence[ModelSample], processor: Processor, dtype: str,
    tolerance: float | None,
) -> Iterator[CheckResult]:  # fmt: skip
    """Compare all backends with the first one, and with each other by the largest difference."""
    names = list(scores)
    if EXACT in scores and dtype != "float32":
        yardstick = compare(scores[EXACT], scores[names[1]], samples, processor)
        for figure in ("mean", "quantile"):
            value = getattr(yardstick, figure)
            yield measured(SECTION, f"{figure} error of {names[1]}", value, "nats")
            for name in names[2:]:
                found = getattr(compare(scores[EXACT], scores[name], samples, processor), figure)
                yield at_most(SECTION, f"{figure} error of {name}", found, BFLOAT16_ERROR * value, "nats")
        names.remove(EXACT)
        limit = math.inf
    else:
        limit = FLOAT32_TOLERANCE if tolerance is None else tolerance
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            found = compare(scores[first], scores[second], samples, processor)
            name, note = f"{first} - {second}, {found.tokens} tokens", f"largest: {found.worst}"
            if limit < math.inf:
                yield at_most(SECTION, f"{name}: largest difference", found.largest, limit, "nats", note)
            elif math.isnan(found.largest):
                yield failed(SECTION, name, note)
            else:
                yield measured(SECTION, f"{name}: largest difference", found.largest, "nats")
            yield measured(SECTION, f"{name}: mean difference", found.mean, "nats")


def compare(first: Scores, second: Scores, samples: Sequence[ModelSample], processor: Processor) -> Difference:
    """Differences of two backends; NaN counts as the largest."""
    by_sample = [
        np.abs(a.astype(np.float64) - b.astype(np.float64))
        for a, b in zip(first.logprobs, second.logprobs, strict=True)
    ]
    flat = np.concatenate(by_sample)
    ranked = [np.nan_to_num(values, nan=np.inf) for values in by_sample]
    index = int(np.argmax([values.max() for values in ranked]))
    token = int(ranked[index].argmax())
    text = processor.tokenizer.decode([int(samples[index].response_token_ids[token])])
    logprobs = (float(scores.logprobs[index][token]) for scores in (first, second))
    worst = f"{samples[index].name}, token {token} {text!r}: {', '.join(f'{each:.4f}' for each in logprobs)}"
    return Difference(float(flat.max()), float(flat.mean()), float(np.quantile(flat, QUANTILE)), len(flat), worst)


def _backends(request: ModelCheckRequest) -> Iterator[tuple[str, str, str, int]]:
    """Name, backend, dtype and processes; transformers first, as the others score the responses that it samples."""
    dtype = request.dtype
    if dtype != "float32" and request.tolerance is None:
        yield EXACT, "transformers", "float32", 1
    sizes = request.sizes  # the fewest processes that hold the layout
    ranks = sizes.pipeline * math.lcm(sizes.tensor, sizes.expert * sizes.expert_tensor)
    for backend, count in (("transformers", 1), ("megatron", ranks), *([("vllm", 1)] if request.vllm else [])):
        yield f"{backend}, {dtype}", backend, dtype, count


def backend_environment(backend: str, request: ModelCheckRequest, processes: int) -> dict[str, str]:
    """Environment variables of a backend's processes, which share the cores."""
    variables = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes))}
    if request.dtype == "float32":
        # cuDNN and Transformer Engine multiply float32 in TF32 by default, with 10 bits of mantissa.
        variables["NVIDIA_TF32_OVERRIDE"] = "0"
    if backend == "vllm":
        variables = {**vllm_environment.engine_environment(request.config()), **variables}
    return variables


# -- validation -----------------------------------------------------------------------------------------------------


def _validate(request: ModelCheckRequest) -> int:
    """Validate the options; returns the limit of prompt and response in tokens. Raises ConfigError."""
    text = _text_config(request)
    try:
        _ = request.compute_options
    except MissingLibraryError as error:
        raise ConfigError(f"--{error}") from error
    if request.dtype not in DTYPES:
        raise ConfigError(f"--dtype={request.dtype} is not one of {', '.join(DTYPES)}")
    if request.tolerance is not None and not request.tolerance >= 0:
        raise ConfigError(f"--tolerance={request.tolerance} must be at least 0")
    sizes = request.sizes
    for option, value in (
        ("--max-new-tokens", request.max_new_tokens), ("--max-model-len", request.max_model_len),
        ("--tp", sizes.tensor), ("--pp", sizes.pipeline), ("--vpp", sizes.virtual), ("--ep", sizes.expert),
        ("--vllm-tp", request.vllm_tensor_parallel),
    ):  # fmt: skip
        if value < 1:
            raise ConfigError(f"{option}={value} must be at least 1")
    if not request.timeout_seconds > 0:
        raise ConfigError(f"--timeout-seconds={request.timeout_seconds:g} must be greater than 0")
    _validate_layout(request, text)
    # vLLM scores a prompt only if there is room for one more token.
    return min(request.max_model_len, int(text.max_position_embeddings) - 1)


def _text_config(request: ModelCheckRequest) -> Any:
    """The text part of the model's configuration. Raises ConfigError for another architecture."""
    description = read_model_config(request.model)
    on_cpu = request.platform == "cpu" or (request.platform == "auto" and not torch.cuda.is_available())
    if request.vllm and on_cpu and (obstacle := cpu_engine_obstacle(description, request.dtype)):
        raise ConfigError(f"--dtype={request.dtype}: {obstacle}; give --dtype bfloat16, or --no-vllm")
    try:
        return load_hf_config(request.model).text_config
    except ValueError as error:
        raise ConfigError(_line(error)) from error


def _validate_layout(request: ModelCheckRequest, text: Any) -> None:
    """Refuse layouts that Megatron would refuse only after transformers has loaded and scored, and missing GPUs."""
    sizes = request.sizes
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
    gpus = torch.cuda.device_count()
    if request.platform == "cuda" and not gpus:
        raise ConfigError("--platform=cuda, but no GPU is visible; use --platform cpu")
    if request.platform == "cpu" or not gpus:
        return
    ranks = max(count for *_, count in _backends(request))
    for option, wanted in (("--tp, --pp and --ep make", ranks), ("--vllm-tp makes", request.vllm_tensor_parallel)):
        if wanted > gpus:
            raise ConfigError(
                f"{option} {wanted} ranks, one GPU each, but {gpus} GPUs are visible; use fewer, or --platform cpu"
            )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
