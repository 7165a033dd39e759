"""Log-probabilities of the samples of `webrl check model`: transformers, Megatron and vLLM, in processes of their own.

The only module of the checks that imports megatron or vLLM.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.checks.samples import ModelSample
from megatron_webrl.config.schema import Config
from megatron_webrl.model.compute_options import ComputeOptions
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.util import torchvision_shim

SPARE_TOKENS = 64  # KV cache room beyond the longest sample, as the cache is allocated in blocks


@dataclass(frozen=True)
class ModelCheckRequest:
    """Options of `webrl check model`."""

    model: Path  # Hugging Face folder
    samples: Path | None = None  # JSONL; None: built-in samples
    sizes: ParallelSizes = field(default_factory=ParallelSizes)
    layers: str = "local"  # or "transformer_engine"
    attention: str = "auto"  # or "sdpa", "varlen", "flash"
    dtype: str = "float32"
    platform: str = "auto"
    tolerance: float | None = None  # largest difference; None: of the dtype
    max_new_tokens: int = 32  # tokens of a response that transformers samples
    max_model_len: int = 4096  # limit of prompt and response; the long built-in sample reaches it
    vllm: bool = True
    vllm_tensor_parallel: int = 1
    timeout_seconds: float = 1800.0  # limit of each backend
    seed: int = 0

    @property
    def compute_options(self) -> ComputeOptions:
        """Megatron's. Raises MissingLibraryError."""
        return ComputeOptions(layers=self.layers, attention=self.attention)  # type: ignore[arg-type]

    def config(self) -> Config:
        """The configuration from which packer and engine are made."""
        config, sizes = Config(), self.sizes
        config.model.path, config.model.dtype, config.model.platform = str(self.model), self.dtype, self.platform
        config.trainer.tensor_parallel, config.trainer.pipeline_parallel = sizes.tensor, sizes.pipeline
        config.trainer.virtual_pipeline, config.trainer.expert_parallel = sizes.virtual, sizes.expert
        config.rollout.tensor_parallel = self.vllm_tensor_parallel
        config.run.startup_timeout_seconds = self.timeout_seconds
        return config


@dataclass(frozen=True)
class ScoringJob:
    """Samples and settings of one backend."""

    request: ModelCheckRequest  # with the backend's folder and dtype
    samples: tuple[ModelSample, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(sample.length for sample in self.samples)


@dataclass(frozen=True)
class Scores:
    """Scores of one process."""

    logprobs: tuple[np.ndarray, ...]  # per sample float32 [response]; empty: another rank returns them
    responses: tuple[np.ndarray, ...]  # per sample int32 [response]; empty: as in the job
    seconds: float  # of scoring
    peak_bytes: int  # GPU memory on CUDA, else the process's largest resident size


def _scores(logprobs: Any, responses: Any, started: float, cuda: bool) -> Scores:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = int(torch.cuda.max_memory_allocated()) if cuda else resident
    return Scores(tuple(logprobs), tuple(responses), time.monotonic() - started, peak)


# -- transformers -------------------------------------------------------------------------------------------------


def score_transformers(job: ScoringJob) -> Iterator[Scores]:
    """Score one sample at a time; samples missing responses."""
    platform = job.request.platform
    cuda = platform == "cuda" or (platform == "auto" and torch.cuda.is_available())
    model = _load_transformers(job.request, torch.device("cuda" if cuda else "cpu"))
    processor = Processor.load(job.request.model)
    started = time.monotonic()
    torch.manual_seed(job.request.seed)
    logprobs, responses = [], []
    with torch.no_grad():
        for each in job.samples:
            visual = {}
            if each.images:
                pixels, _ = processor.pixels(each.images)
                grids = _long(each.image_grids, model.device)
                visual = {"pixel_values": pixels.to(model.device, model.dtype), "image_grid_thw": grids}
            response = each.response_token_ids
            if not len(response):
                response = _generate(model, job.request.max_new_tokens, each, processor, visual)
            ids = _long(np.concatenate([each.prompt_token_ids, response]), model.device)[None]
            types = (ids == processor.image_token_id).int()
            kept = len(response) + 1
            output = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, logits_to_keep=kept, **visual)
            targets = ids[0, len(each.prompt_token_ids) :, None]
            scores = output.logits[0, :-1].float().log_softmax(dim=-1).gather(1, targets)
            logprobs.append(scores.squeeze(1).cpu().numpy())
            responses.append(response)
    yield _scores(logprobs, responses, started, cuda)


def _load_transformers(request: ModelCheckRequest, device: torch.device) -> Any:
    """The model. Raises ValueError unless the folder has exactly the model's tensors."""
    torchvision_shim.install()
    from transformers import AutoModelForImageTextToText

    try:
        model, report = AutoModelForImageTextToText.from_pretrained(
            str(request.model),
            dtype=getattr(torch, request.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(f"transformers cannot load {request.model}: {error}") from error
    # transformers fills missing tensors with random numbers.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            names = ", ".join(sorted(map(str, report[kind])))
            raise ValueError(f"transformers finds {kind} in {request.model}: {names}")
    return model.to(device).eval()


def _generate(
    model: Any, max_new_tokens: int, sample: ModelSample, processor: Processor, visual: dict[str, torch.Tensor]
) -> np.ndarray:
    """A response sampled at temperature 1 without image tokens: int32 [up to max_new_tokens]."""
    from transformers import GenerationConfig

    ids, config = _long(sample.prompt_token_ids, model.device)[None], model.config
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    # The folder's generation config may truncate the distribution.
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=processor.eos_token_id,
        pad_token_id=processor.eos_token_id,
        suppress_tokens=[getattr(config, name) for name in names],
    )
    types = (ids == processor.image_token_id).int()
    output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=types, **visual)
    return output[0, ids.shape[1] :].cpu().numpy().astype(np.int32)


def _long(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values, np.int64)).to(device)


# -- Megatron -----------------------------------------------------------------------------------------------------


def score_megatron(job: ScoringJob) -> Iterator[Scores]:
    """Form process groups, load this rank's part of the model, score the trainer's micro-batches. Collective."""
    from megatron_webrl.model import platform as platforms

    torchvision_shim.install()
    request = job.request
    platform = platforms.activate(request.platform)
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{tempfile.gettempdir()}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=request.timeout_seconds),
    )
    # Megatron must be imported after the platform is active.
    from megatron.core import parallel_state

    from megatron_webrl.model import process_groups, schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs

    process_groups.init_process_groups(request.sizes, request.seed)
    chunks = build_model(request.model, dtype=request.dtype, platform=platform, options=request.compute_options)
    load_hf(chunks, request.model)
    for chunk in chunks:
        chunk.eval()
    started = time.monotonic()
    by_sample = _microbatches(job, platform)
    microbatches = [each for part in by_sample for each in part]

    def scored(index: int, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        group, vocabulary = parallel_state.get_tensor_model_parallel_group(), chunks[-1].unpadded_vocab_size
        values, _ = vocab_parallel_logprobs(logits, microbatches[index].targets, 1.0, vocabulary, group)
        return values.sum(), {"logprobs": values}

    with torch.no_grad():
        results = schedule.forward_backward(chunks, [each.inputs for each in microbatches], scored, forward_only=True)
    first = parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0
    logprobs = [result["logprobs"].float().cpu().numpy() for result in results] if first else []  # of the last stage
    starts = np.cumsum([0, *(len(part) for part in by_sample)])[:-1]
    yield _scores([logprobs[i] for i in starts] if logprobs else [], (), started, platform.name == "cuda")
    torch.distributed.barrier()  # no rank ends before the others have their results


def _microbatches(job: ScoringJob, platform: Any) -> list[list[Any]]:
    """The micro-batches of each sample, itself first: a virtual pipeline needs more, which the packer pads with it."""
    from megatron_webrl.checks.oracles import training_sample
    from megatron_webrl.trainer.factory import make_sequence_packer

    config = job.request.config()
    config.trainer.tokens_per_microbatch = job.longest
    packer = make_sequence_packer(config, platform)
    samples = [
        training_sample(each.prompt_token_ids, each.response_token_ids, each.images, each.image_grids)
        for each in job.samples
    ]
    return [packer.build([sample], "token_mean", 1) for sample in samples]


# -- vLLM ---------------------------------------------------------------------------------------------------------


def score_vllm(job: ScoringJob) -> Iterator[Scores]:
    """Start an engine in this process and score all samples in one batch: responses as part of a prompt."""
    request, config = job.request, job.request.config()
    cuda = vllm_environment.on_cuda(config)
    torchvision_shim.install()
    os.environ.update(vllm_environment.engine_environment(config))
    if request.vllm_tensor_parallel == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm_environment.check_platform(config)
    from vllm import LLM, SamplingParams

    images: Any = {"image": max(1, *(len(sample.images) for sample in job.samples)), "video": 0}
    text = read_model_config(request.model)["text_config"]
    width = text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]
    token_bytes = 2 * width * (4 if request.dtype == "float32" else 2)  # of the KV cache
    # By default vLLM's CPU build takes nearly all memory of the machine.
    memory: dict[str, Any] = {"kv_cache_memory_bytes": 2 * (job.longest + SPARE_TOKENS) * token_bytes}
    if cuda:
        memory = {"gpu_memory_utilization": config.rollout.gpu_memory_utilization}
    llm = LLM(
        model=str(request.model),
        dtype=request.dtype,
        seed=request.seed,
        tensor_parallel_size=request.vllm_tensor_parallel,
        max_model_len=job.longest + 1,  # a request generates a token
        limit_mm_per_prompt=images,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **memory,
    )
    processor, started = Processor.load(request.model), time.monotonic()
    prompts: list[Any] = []
    for sample in job.samples:
        prompts.append({"prompt_token_ids": [*sample.token_ids.tolist(), *sample.response_token_ids.tolist()]})
        if sample.images:
            prompts[-1]["multi_modal_data"] = {"image": [decode_image(data) for data in sample.images]}
    sampling_params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    logprobs = [_vllm_logprobs(*each, processor) for each in zip(outputs, job.samples, strict=True)]
    yield _scores(logprobs, (), started, cuda)


def _vllm_logprobs(output: Any, sample: ModelSample, processor: Processor) -> np.ndarray:
    """float32 [response]. Raises ValueError if vLLM expanded an image to another number of tokens."""
    tokens = np.asarray(output.prompt_token_ids, np.int32)
    if not np.array_equal(tokens, np.concatenate([sample.prompt_token_ids, sample.response_token_ids])):
        raise ValueError(
            f"sample {sample.name}: vLLM expanded the images to {processor.image_token_counts(tokens).tolist()} "
            f"tokens, the processor to {processor.image_token_counts(sample.prompt_token_ids).tolist()}"
        )
    rows = output.prompt_logprobs[len(sample.prompt_token_ids) :]
    return np.array([row[int(t)].logprob for row, t in zip(rows, sample.response_token_ids, strict=True)], np.float32)
