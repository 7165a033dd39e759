"""`webrl check model`: do transformers, Megatron and vLLM give a checkpoint's responses the same log-probabilities?

In float32 no token may differ by more than a tolerance. In bfloat16 single tokens of a right implementation differ by a
quarter: mean and quantile of the error, against transformers in float32, are compared with those of transformers in
bfloat16. So are gradients of the mean log-probability.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image
from rich.console import Console

from megatron_webrl.checks.model_scores import Scores, ScoringJob
from megatron_webrl.checks.processes import run_processes
from megatron_webrl.checks.report import CheckResult, at_most, failed, measured, skipped
from megatron_webrl.config.schema import Config, check_head_dtype
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.validation import check_packages
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.placement.memory_estimate import check_parallel_layout
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.trainer.data.batching import TrainingSample

SECTION = "model"
FLOAT32_TOLERANCE = 1e-3  # of the largest difference, and of the mean relative error of gradients
BFLOAT16_ERROR = 2.0  # times the error of transformers in bfloat16
QUANTILE = 0.95
EXACT = "transformers, float32"
SYSTEM_PROMPT = "You are a web agent. You see a screenshot of a page and say what you do next."
RESPONSES = ("I click on the red button at the top of the page.", "I type my address, then I press Enter to go on.")


@dataclass(frozen=True)
class ModelCheckRequest:
    """Options of `webrl check model`."""

    config: Config  # model.*, trainer's layout and kernels, rollout.tensor_parallel, run.startup_timeout_seconds
    samples: Path | None = None  # JSONL; None: built-in samples
    max_model_len: int = 4096  # limit of prompt and response; the long built-in sample reaches it
    tolerance: float | None = None  # largest difference; None: of the dtype
    gradients: bool = False
    vllm: bool = True

    @property
    def ranks(self) -> int:
        """The fewest Megatron processes that hold the layout."""
        sizes = self.config.trainer
        return sizes.pipeline_parallel * math.lcm(sizes.tensor_parallel, sizes.expert_parallel)

    def backends(self) -> Iterator[tuple[str, str, str, int]]:
        """Name, backend, dtype and processes; the gradients of the first one are what others are compared with."""
        dtype = self.config.model.dtype
        if dtype != "float32" and (self.tolerance is None or self.gradients):
            yield EXACT, "transformers", "float32", 1
        for backend, ranks in (("transformers", 1), ("megatron", self.ranks), *[("vllm", 1)] * self.vllm):
            yield f"{backend}, {dtype}", backend, dtype, ranks


def check_model(request: ModelCheckRequest, console: Console) -> list[CheckResult]:
    """Score and compare. Raises ConfigError for invalid input."""
    processor, longest = _validate(request)
    read = partial(read_samples, request.samples) if request.samples else built_in_samples
    samples, seconds = read(processor, longest), request.config.run.startup_timeout_seconds
    results, scores = list[CheckResult](), dict[str, Scores]()
    with tempfile.TemporaryDirectory(prefix="webrl-check-") as folder:
        for name, backend, dtype, ranks in request.backends():
            if backend == "vllm" and importlib.util.find_spec("vllm") is None:
                results.append(skipped(SECTION, name, "vLLM is not installed"))
                continue
            config = copy.deepcopy(request.config)
            config.model.dtype = dtype
            job = ScoringJob(config, tuple(samples), Path(folder) if request.gradients else None)
            with console.status(f"{name}: {len(samples)} samples, {ranks} processes"):
                environment = backend_environment(backend, config, ranks)
                outcomes = run_processes(
                    f"{ScoringJob.__module__}:score_{backend}", [job] * ranks, seconds, environment
                )
            if bad := [outcome for outcome in outcomes if outcome.error]:
                console.print(bad[0].log, markup=False, style="dim")
                reasons = "; ".join(dict.fromkeys(outcome.error for outcome in bad))
                return [*results, failed(SECTION, name, f"{reasons} (--timeout-seconds={seconds:g})")]
            parts: list[Scores] = [outcome.results[0] for outcome in outcomes]
            logprobs = {number: values for part in parts for number, values in part.logprobs.items()}
            slowest, memory = max(part.seconds for part in parts), sum(part.peak_bytes for part in parts)
            scores[name] = Scores(logprobs, slowest, gradient_error=max(part.gradient_error for part in parts))
            results.append(measured(SECTION, f"{name}: score", slowest, "s"))
            results.append(measured(SECTION, f"{name}: peak memory of {ranks} processes", memory / 2**20, "MiB"))
            if backend == "megatron" and ranks == 1:
                speed = parts[0].operations / slowest / 1e12
                results.append(measured(SECTION, f"{name}: arithmetic", speed, "TFLOP/s", parts[0].peak_tflops))
    return [*results, *judge(scores, samples, processor, request)]


def judge(
    scores: Mapping[str, Scores], samples: Sequence[TrainingSample], processor: Processor, request: ModelCheckRequest
) -> Iterator[CheckResult]:
    """Compare all backends with the first one, and with each other by the largest difference."""
    names, single = list(scores), request.config.model.dtype == "float32"
    limit = request.tolerance if request.tolerance is not None else FLOAT32_TOLERANCE if single else math.inf
    if EXACT in names and not single:
        names.remove(EXACT)
        for figure, value_of in (("mean", np.mean), ("quantile", partial(np.quantile, q=QUANTILE))):
            errors = {name: float(value_of(differences(scores[EXACT], scores[name], samples))) for name in names}
            yield measured(SECTION, f"{figure} error of {names[0]}", errors[names[0]], "nats")
            for name in names[1:]:
                least = BFLOAT16_ERROR * errors[names[0]]
                yield at_most(SECTION, f"{figure} error of {name}", errors[name], least, "nats")
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            found = differences(scores[first], scores[second], samples)
            name, note = f"{first} - {second}, {len(found)} tokens", ""
            at = int(np.nan_to_num(found, nan=np.inf).argmax())  # NaN counts as the largest
            for sample in samples:
                if 0 <= at < len(sample.response):
                    number, text = sample.trajectory_id[0], processor.tokenizer.decode([int(sample.response[at])])
                    both = ", ".join(f"{scores[each].logprobs[number][at]:.4f}" for each in (first, second))
                    note = f"largest: sample {number}, token {at} {text!r}: {both}"
                at -= len(sample.response)
            yield at_most(SECTION, f"{name}: largest difference", float(found.max()), limit, "nats", note)
            yield measured(SECTION, f"{name}: mean difference", float(found.mean()), "nats")
    if request.gradients:
        most = FLOAT32_TOLERANCE if single else BFLOAT16_ERROR * scores[names[0]].gradient_error
        error = scores[names[1]].gradient_error
        yield at_most(SECTION, f"gradients of {names[1]}: mean error", error, most, "of the norm")


def differences(first: Scores, second: Scores, samples: Sequence[TrainingSample]) -> np.ndarray:
    """Absolute differences of the log-probabilities of all samples, float64 [tokens]."""
    numbers = [sample.trajectory_id[0] for sample in samples]
    a, b = (np.concatenate([each.logprobs[n] for n in numbers]).astype(np.float64) for each in (first, second))
    return np.abs(a - b)


def backend_environment(backend: str, config: Config, processes: int) -> dict[str, str]:
    """Environment variables of a backend's processes, which share the cores."""
    variables = vllm_environment.engine_environment(config) if backend == "vllm" else {}
    variables["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    if config.model.dtype == "float32":
        # cuDNN and Transformer Engine multiply float32 in TF32 by default, with 10 bits of mantissa.
        variables["NVIDIA_TF32_OVERRIDE"] = "0"
    return variables


def _validate(request: ModelCheckRequest) -> tuple[Processor, int]:
    """The processor, and the limit of prompt and response in tokens. Raises ConfigError."""
    config, trainer, path = request.config, request.config.trainer, request.config.model.path
    description = read_model_config(path)
    check_head_dtype(config)
    # vLLM scores a prompt only if there is room for one more token.
    longest = min(request.max_model_len, int(description["text_config"]["max_position_embeddings"]) - 1)
    config.rollout.max_model_len = longest
    trainer.data_parallel = request.ranks // (trainer.pipeline_parallel * trainer.tensor_parallel)
    if not request.vllm:
        config.rollout.dtype = "bfloat16"  # which every build of vLLM computes
    check_packages(trainer)
    check_parallel_layout(config, description)
    if request.tolerance is not None and not request.tolerance >= 0:
        raise ConfigError(f"--tolerance={request.tolerance} must be at least 0")
    if request.gradients and trainer.data_parallel > 1:
        raise ConfigError(f"--gradients needs --ep={trainer.expert_parallel} to divide --tp={trainer.tensor_parallel}")
    gpus = torch.cuda.device_count() if config.model.platform != "cpu" else 0
    ranks = max(request.ranks, config.rollout.tensor_parallel)
    if ranks > gpus and (gpus or config.model.platform == "cuda"):
        raise ConfigError(f"the layout needs {ranks} GPUs, but {gpus} are visible; use fewer ranks, or --platform cpu")
    try:
        return Processor.load(path), longest
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} has no processor of Qwen3-VL: {' '.join(str(error).split())}") from error


# -- samples: conversations with images and a response --------------------------------------------------------------


def read_samples(path: Path, processor: Processor, max_model_len: int) -> list[TrainingSample]:
    """Samples of a JSONL file: {"messages": [...], "response": "..."} on each line.

    A message has "role" and "content": text, or a list of {"type": "text", "text": ...} and {"type": "image", "path":
    ...}, paths relative to the file. Raises ConfigError naming file and line.
    """
    try:
        lines = [(n, line) for n, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--samples={path} cannot be read: {error}") from error
    samples = []
    for number, line in lines:
        try:
            fields, images = json.loads(line), list[bytes]()
            messages = [_message(message, path.parent, images) for message in fields["messages"]]
            samples.append(make_sample(number, messages, images, fields["response"], processor, max_model_len))
        except (KeyError, TypeError, AttributeError) as error:
            known = '{"messages": [{"role": ..., "content": ...}], "response": text}'
            raise ConfigError(f"{path} line {number} is not {known}: {type(error).__name__}: {error}") from error
        except (OSError, ValueError, TemplateError) as error:
            raise ConfigError(f"{path} line {number}: {' '.join(str(error).split())}") from error
    if not samples:
        raise ConfigError(f"--samples={path} contains no sample")
    return samples


def _message(message: Any, folder: Path, images: list[bytes]) -> dict[str, Any]:
    """The message for the processor; appends its images."""
    parts = message["content"]
    for part in parts if isinstance(parts, list) else ():
        if part["type"] == "image":
            images.append((folder / part["path"]).read_bytes())
            decode_image(images[-1])
        elif part["type"] != "text":
            raise ValueError(f"type {part['type']!r} is neither text nor image")
    return {"role": message["role"], "content": parts}


def built_in_samples(processor: Processor, max_model_len: int) -> list[TrainingSample]:
    """Text; a screenshot with two responses; three image sizes; rounds of screenshots that fill `max_model_len`.

    Raises ConfigError if they do not fit.
    """

    def ask(text: str, images: int = 0) -> dict[str, Any]:
        return {"role": "user", "content": [*[{"type": "image"}] * images, {"type": "text", "text": text}]}

    def make(number: int, turns: list[dict[str, Any]], pages: list[bytes], response: str) -> TrainingSample:
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, *turns]
        return make_sample(number, messages, pages, response, processor, max_model_len)

    def long(rounds: int) -> TrainingSample:
        turn = [ask("What do you do next?", 1), {"role": "assistant", "content": RESPONSES[0]}]
        return make(5, [*turn * rounds, ask("Go on.")], [screenshot(9, 480, 320)] * rounds, RESPONSES[1])

    (first, second), page, task = RESPONSES, screenshot(1, 640, 400), ask("Task: put the book in the basket.", 1)
    several = [screenshot(2, 320, 480), screenshot(3, 512, 160), screenshot(4, 128, 128)]
    try:
        samples = [
            make(1, [ask("Name three things that a shop's page shows.")], [], second),
            make(2, [task], [page], first),
            make(3, [task], [page], second),
            make(4, [ask("Which of these pages asks for an address?", 3)], several, first),
        ]
        empty = long(0).length
        return [*samples, long((max_model_len - empty) // (long(1).length - empty))]
    except ValueError as error:
        raise ConfigError(f"built-in sample: {error}") from error


def make_sample(
    number: int, messages: list[dict[str, Any]], images: list[bytes], response: str, processor: Processor, longest: int
) -> TrainingSample:
    """Sample `number`, of at most `longest` tokens. Raises ValueError."""
    grids = processor.grids(images)
    prompt = processor.expand_image_tokens(processor.encode_chat(messages), grids)
    tokens = processor.encode_response(response)
    if np.isin(tokens, processor.placeholder_token_ids).any():
        raise ValueError("the response contains an image placeholder; images are allowed in messages only")
    if len(prompt) + len(tokens) > longest:
        raise ValueError(
            f"{len(prompt)} + {len(tokens)} tokens of prompt and response exceed --max-model-len={longest}"
        )
    return TrainingSample(
        prompt=prompt,
        response=tokens,
        behaviour_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        images=tuple(images),
        grids=grids,
        temperature=1.0,
        advantage=1.0,
        trajectory_steps=1,
        trajectory_id=(number, 0),
    )


def screenshot(seed: int, width: int, height: int) -> bytes:
    """Squares of random colours, as PNG of width x height pixels."""
    squares = np.random.default_rng(seed).integers(0, 256, (height // 16, width // 16, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST).save(buffer, "PNG")
    return buffer.getvalue()
