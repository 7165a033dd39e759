"""Log-probabilities of vLLM: responses are scored as part of a prompt."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from megatron_webrl.checks.parity.samples import ParitySample
from megatron_webrl.checks.parity.scoring_process import (
    ProcessScores,
    ScoringJob,
    Stopwatch,
    peak_bytes,
    run_scoring_process,
)
from megatron_webrl.config.schema import Config
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.util import torchvision_shim

SPARE_TOKENS = 64  # KV cache room beyond the longest sample, as the cache is allocated in blocks


def score(job: ScoringJob, folder: Path) -> ProcessScores:
    """Start an engine in this process and score all samples in one batch."""
    stopwatch = Stopwatch()
    config = _config(job)
    cuda = vllm_environment.on_cuda(config)
    torchvision_shim.install()
    os.environ.update(vllm_environment.engine_environment(config))
    if job.vllm_tensor_parallel == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm_environment.check_platform(config)
    from vllm import LLM, SamplingParams

    llm = LLM(**_arguments(job, config, cuda))
    processor = Processor.load(job.model)
    stopwatch.lap()
    sampling_params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([_prompt(sample) for sample in job.samples], sampling_params, use_tqdm=False)
    logprobs = tuple(_logprobs(output, sample, processor) for output, sample in zip(outputs, job.samples, strict=True))
    seconds = stopwatch.lap()
    peak = peak_bytes(cuda)
    return ProcessScores(logprobs, (), seconds, peak)


def _config(job: ScoringJob) -> Config:
    """The configuration from which the engine's environment is derived."""
    config = Config()
    config.model.path, config.model.dtype, config.model.platform = str(job.model), job.dtype, job.platform
    config.rollout.tensor_parallel = job.vllm_tensor_parallel
    config.run.startup_timeout_seconds = job.timeout_seconds
    return config


def _arguments(job: ScoringJob, config: Config, cuda: bool) -> dict[str, Any]:
    longest = max(sample.length for sample in job.samples)
    images: Any = {"image": max(1, *(len(sample.images) for sample in job.samples)), "video": 0}
    memory = {"gpu_memory_utilization": config.rollout.gpu_memory_utilization}
    return {
        "model": str(job.model),
        "dtype": job.dtype,
        "seed": job.seed,
        "tensor_parallel_size": job.vllm_tensor_parallel,
        "max_model_len": longest + 1,  # a request generates a token
        "limit_mm_per_prompt": images,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        # By default vLLM's CPU build takes nearly all memory of the machine.
        **(memory if cuda else {"kv_cache_memory_bytes": 2 * (longest + SPARE_TOKENS) * _cache_bytes(job)}),
    }


def _cache_bytes(job: ScoringJob) -> int:
    """KV cache bytes of one token on one rank."""
    text = read_model_config(job.model)["text_config"]
    width = text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]
    return 2 * width * (4 if job.dtype == "float32" else 2)


def _prompt(sample: ParitySample) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": [*sample.token_ids.tolist(), *sample.response_token_ids.tolist()]}
    if sample.images:
        prompt["multi_modal_data"] = {"image": [decode_image(data) for data in sample.images]}
    return prompt


def _logprobs(output: Any, sample: ParitySample, processor: Processor) -> np.ndarray:
    """float32 [response]. Raises ValueError if vLLM expanded an image to another number of tokens."""
    tokens = np.asarray(output.prompt_token_ids, np.int32)
    if not np.array_equal(tokens, np.concatenate([sample.prompt_token_ids, sample.response_token_ids])):
        raise ValueError(
            f"sample {sample.name}: vLLM expanded the images to {processor.image_token_counts(tokens).tolist()} "
            f"tokens, the processor to {processor.image_token_counts(sample.prompt_token_ids).tolist()}"
        )
    rows = output.prompt_logprobs[len(sample.prompt_token_ids) :]
    return np.array([row[int(t)].logprob for row, t in zip(rows, sample.response_token_ids, strict=True)], np.float32)


if __name__ == "__main__":
    run_scoring_process(score)
