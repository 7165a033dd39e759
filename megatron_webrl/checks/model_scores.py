"""Log-probabilities and gradients of samples by transformers, Megatron and vLLM, in processes of their own.

The only module of the checks that imports megatron or vLLM.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_webrl.config.schema import Config
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from megatron_webrl.model.layout import replica_ranks
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.placement.hardware import find_card
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.trainer.data.batching import TrainingSample
from megatron_webrl.util import torchvision_shim


@dataclass(frozen=True)
class ScoringJob:
    """Samples and settings of one backend."""

    config: Config  # of its model and layout
    samples: tuple[TrainingSample, ...]
    gradients: Path | None  # folder of the first backend's gradients, which others compare with theirs; None: none

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(sample.length for sample in self.samples)

    def compare_gradients(self, found: Mapping[str, Tensor]) -> float:
        """Mean over parameters of the error relative to the first backend's, whose own are stored; 0 for these."""
        assert self.gradients is not None
        file = self.gradients / "first.pt"
        if not file.exists():
            torch.save({name: tensor.float().cpu() for name, tensor in found.items()}, file)
            return 0.0
        first = torch.load(file, mmap=True)
        errors = [(found[n].float().cpu() - each).norm() / each.norm().clamp(min=1e-30) for n, each in first.items()]
        return float(torch.stack(errors).mean())  # NaN if there is one


@dataclass(frozen=True)
class Scores:
    """Scores of one process."""

    logprobs: dict[int, np.ndarray]  # by number of the sample, float32 [response]; without those of other ranks
    seconds: float  # of scoring, gradients included
    operations: float = 0.0  # floating-point operations of scoring, if known
    gradient_error: float = 0.0
    peak_tflops: float | None = None  # of the GPU, if known
    peak_bytes: int = field(default_factory=lambda: peak_bytes())


def peak_bytes() -> int:
    """GPU memory on CUDA, else the process's largest resident size."""
    if torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- transformers ---------------------------------------------------------------------------------------------------


def score_transformers(job: ScoringJob) -> Iterator[Scores]:
    """Score one sample at a time."""
    torchvision_shim.install()
    cuda = vllm_environment.on_cuda(job.config)
    model = _load_transformers(job.config).to("cuda" if cuda else "cpu").eval()
    processor = Processor.load(job.config.model.path)
    started, logprobs = time.monotonic(), {}
    total = sum(len(sample.response) for sample in job.samples)
    for sample in job.samples:
        inputs: dict[str, Any] = {}
        if sample.images:
            inputs["pixel_values"] = processor.pixels(sample.images)[0].to(model.device, model.dtype)
            inputs["image_grid_thw"] = torch.from_numpy(sample.grids.astype(np.int64)).to(model.device)
        tokens = np.concatenate([sample.prompt, sample.response]).astype(np.int64)
        ids = torch.from_numpy(tokens).to(model.device)[None]
        types, kept = (ids == processor.image_token_id).int(), len(sample.response) + 1
        with torch.set_grad_enabled(job.gradients is not None):
            output = model(input_ids=ids, mm_token_type_ids=types, use_cache=False, logits_to_keep=kept, **inputs)
            targets = ids[0, len(sample.prompt) :, None]
            scores = output.logits[0, :-1].float().log_softmax(dim=-1).gather(1, targets).squeeze(1)
        if job.gradients:
            (scores.sum() / total).backward()
        logprobs[sample.trajectory_id[0]] = scores.detach().cpu().numpy()
    seconds, error = time.monotonic() - started, 0.0
    if job.gradients:
        # In memory transformers keeps experts as layers do, where the released files may hold them transposed.
        mappings = parameter_mappings(load_hf_config(job.config.model.path))
        transposed = {mapping.hf_param for mapping in mappings if mapping.transposed}
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        error = job.compare_gradients({name: g.mT if name in transposed else g for name, g in gradients.items()})
    yield Scores(logprobs, seconds, gradient_error=error)


def _load_transformers(config: Config) -> Any:
    """The model. Raises ValueError unless the folder has exactly the model's tensors."""
    from transformers import AutoModelForImageTextToText

    path, dtype = config.model.path, getattr(torch, config.model.dtype)
    try:
        model, report = AutoModelForImageTextToText.from_pretrained(
            path, dtype=dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError) as error:
        raise ValueError(f"transformers cannot load {path}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):  # it fills missing tensors with random numbers
        if report[kind]:
            raise ValueError(f"transformers finds {kind} in {path}: {', '.join(sorted(map(str, report[kind])))}")
    return model


# -- Megatron -------------------------------------------------------------------------------------------------------


def score_megatron(job: ScoringJob) -> Iterator[Scores]:
    """Load this rank's part of the model, and score the trainer's micro-batches of all samples. Collective."""
    from megatron_webrl.model import platform as platforms

    torchvision_shim.install()
    config = job.config
    platform = platforms.activate(config.model.platform)
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{tempfile.gettempdir()}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=config.run.startup_timeout_seconds),
    )
    # Megatron must be imported after the platform is active.
    from megatron.core import parallel_state

    from megatron_webrl.model import process_groups, schedule
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.logprobs import vocab_parallel_logprobs
    from megatron_webrl.trainer.main import compute_options, make_sequence_packer
    from megatron_webrl.trainer.optimizer import wrap_ddp
    from megatron_webrl.trainer.parallel import parallel_sizes

    process_groups.init_process_groups(parallel_sizes(config))
    options = compute_options(config, platform)
    chunks = build_model(config.model.path, dtype=config.model.dtype, platform=platform, options=options)
    load_hf(chunks, config.model.path)
    wrapped = wrap_ddp(chunks) if job.gradients else chunks
    config.trainer.tokens_per_microbatch = job.longest
    passes = 2 if platform.name == "cuda" else 1  # the first pass compiles kernels
    microbatches = make_sequence_packer(config, platform).build(job.samples, "token_mean", 1, passes)

    def scored(index: int, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        group, vocabulary = parallel_state.get_tensor_model_parallel_group(), chunks[-1].unpadded_vocab_size
        values, _ = vocab_parallel_logprobs(logits, microbatches[index].targets, 1.0, vocabulary, group)
        # Megatron averages the loss over micro-batches.
        return len(microbatches) * (values * microbatches[index].weight).sum(), {"logprobs": values.detach()}

    inputs, results, started = [each.inputs for each in microbatches], list[dict[str, Tensor]](), 0.0
    for _ in range(passes):
        for chunk in wrapped:
            chunk.eval()
            if job.gradients:
                chunk.zero_grad_buffer()
        started = time.monotonic()
        with torch.set_grad_enabled(job.gradients is not None):
            results = schedule.forward_backward(wrapped, inputs, scored, forward_only=job.gradients is None)
        if platform.name == "cuda":
            torch.cuda.synchronize()
    seconds, logprobs = time.monotonic() - started, {}
    if parallel_state.get_tensor_model_parallel_rank() == 0:
        for microbatch, result in zip(microbatches, results, strict=False):  # no results but on the last stage
            for step, (number, *_) in enumerate(microbatch.step_ids if microbatch.token_count else ()):
                logprobs[number] = result["logprobs"][microbatch.step_index == step].float().cpu().numpy()
    operations = sum(each.operations for each in microbatches) * (3 if job.gradients else 1)
    error = job.compare_gradients(found) if (found := _gather_gradients(job, chunks)) else 0.0
    card = find_card(torch.cuda.get_device_name()) if platform.name == "cuda" else None
    yield Scores(logprobs, seconds, operations, error, card.peak_tflops if card else None)
    torch.distributed.barrier()  # no rank ends before the others have their results


def _gather_gradients(job: ScoringJob, chunks: list[Any]) -> dict[str, Tensor]:
    """On the first rank the gradients by Hugging Face name, float32; elsewhere and without gradients none."""
    from megatron_webrl.model.parameter_map import from_megatron
    from megatron_webrl.trainer.parallel import parallel_sizes

    if not job.gradients:
        return {}
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    own = {name: p.main_grad.cpu() for chunk in chunks for name, p in chunk.canonical_parameters().items()}
    torch.save(own, job.gradients / f"{rank}.pt")
    torch.distributed.barrier()
    if rank:
        return {}
    found: dict[str, Tensor] = {}
    shards = [torch.load(job.gradients / f"{number}.pt", mmap=True) for number in range(ranks)]
    for mapping in chunks[0].mappings:
        replicas = replica_ranks(mapping, chunks[0].hf_config, parallel_sizes(job.config), ranks)
        whole = found.setdefault(mapping.hf_param, torch.zeros(mapping.tensor_shape))
        from_megatron(mapping, [shards[first][mapping.megatron_param] for first, *_ in replicas], whole)
    return found


# -- vLLM -----------------------------------------------------------------------------------------------------------


def score_vllm(job: ScoringJob) -> Iterator[Scores]:
    """Start an engine in this process and score all samples in one batch: responses as part of a prompt."""
    config = job.config
    torchvision_shim.install()
    if config.rollout.tensor_parallel == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm_environment.check_platform(config)
    from vllm import LLM, SamplingParams

    images: Any = {"image": max(1, *(len(sample.images) for sample in job.samples)), "video": 0}
    text = read_model_config(config.model.path)["text_config"]
    width = text["num_hidden_layers"] * text["num_key_value_heads"] * text["head_dim"]
    token_bytes = 2 * width * (4 if config.model.dtype == "float32" else 2)  # of the KV cache
    # By default vLLM's CPU build takes nearly all memory of the machine. The room beyond the longest sample is that of
    # blocks, and of the states of linear attention.
    room = vllm_environment.CPU_KV_CACHE_MIB * 2**20
    memory: dict[str, Any] = {"kv_cache_memory_bytes": room + 2 * job.longest * token_bytes}
    if vllm_environment.on_cuda(config):
        memory = {"gpu_memory_utilization": config.rollout.gpu_memory_utilization}
    llm = LLM(
        model=config.model.path,
        dtype=config.model.dtype,
        hf_overrides={"head_dtype": config.model.head_dtype},
        tensor_parallel_size=config.rollout.tensor_parallel,
        max_model_len=job.longest + 1,  # a request generates a token
        limit_mm_per_prompt=images,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
        **memory,
    )
    processor, started, prompts = Processor.load(config.model.path), time.monotonic(), list[Any]()
    for sample in job.samples:
        tokens = [*processor.collapse_image_tokens(sample.prompt).tolist(), *sample.response.tolist()]
        prompts.append({"prompt_token_ids": tokens})
        if sample.images:
            prompts[-1]["multi_modal_data"] = {"image": [decode_image(data) for data in sample.images]}
    sampling_params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate(prompts, sampling_params, use_tqdm=False)
    logprobs = {}
    for sample, output in zip(job.samples, outputs, strict=True):
        number, tokens = sample.trajectory_id[0], sample.response.tolist()
        if output.prompt_token_ids != [*sample.prompt.tolist(), *tokens]:
            raise ValueError(f"sample {number}: vLLM expands images to other tokens than the processor")
        rows = output.prompt_logprobs[len(sample.prompt) :]
        logprobs[number] = np.array([row[t].logprob for row, t in zip(rows, tokens, strict=True)], np.float32)
    yield Scores(logprobs, time.monotonic() - started)
