"""Build the learner and the sequence packer that a configuration describes."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_pg_rank

from megatron_webrl.config.advantage import CriticConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.model.build import LoadError, build_model, load_hf
from megatron_webrl.model.compute_options import (
    AttentionKernel,
    ComputeOptions,
    ExpertKernel,
    LayerImplementation,
    Recompute,
    ValueHeadKind,
)
from megatron_webrl.model.hf_config import choose_prefix_merging, load_hf_config, read_model_config
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language import swiglu, vision
from megatron_webrl.model.vision_language.compilation import compilation_problem
from megatron_webrl.model.vision_language.model import VisionLanguageModel
from megatron_webrl.model.vision_language.routing_replay import replays_routing
from megatron_webrl.placement.memory_estimate import choose_recompute, image_buffer_mib
from megatron_webrl.track.timeline import OFF, Timeline
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_weights
from megatron_webrl.trainer.data.flops import FlopsEstimator
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.images import ImagePrefetcher, WaitTimer
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.optimizer import check_adam_implementation, make_optimizer, wrap_ddp
from megatron_webrl.trainer.parallel import all_gather_object
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)


def make_learner(
    config: Config,
    platform: Platform,
    *,
    with_weights: bool = True,
    timeline: Timeline = OFF,
    report_progress: Callable[[], None] = lambda: None,
) -> Learner:
    """Load the model and make its optimiser. Collective.

    Weights are read from storage by the first data-parallel replica and broadcast to the others; without `with_weights`
    they are arbitrary until a checkpoint is loaded. Raises LoadError or CheckpointError on every rank, or
    MissingLibraryError.
    """
    check_adam_implementation(config.trainer.optimizer.implementation)
    started, dtype = time.monotonic(), getattr(torch, config.model.dtype)
    options = compute_options(config, platform)
    chunks = build_model(config.model.path, dtype=dtype, platform=platform, options=options)
    if with_weights and not config.model.checkpoint:
        _load_first_replicas(chunks, config.model.path)
    wrapped = wrap_ddp(chunks)  # broadcasts the parameters
    if with_weights and config.model.checkpoint:
        load_weights(Path(config.model.checkpoint), wrapped)
    optimizer = make_optimizer(wrapped, config.trainer.optimizer, config.trainer.optimizer_steps, dtype)
    if torch.distributed.get_rank() == 0:
        log.info("%s", describe_fusions(options))
    log.info("model loaded in %.1f s", time.monotonic() - started)
    return Learner(wrapped, chunks[0].unpadded_vocab_size, optimizer, None, timeline, report_progress)


def _load_first_replicas(chunks: Sequence[VisionLanguageModel], folder: str) -> None:
    error: Exception | None = None
    try:
        load_hf(chunks, folder, first_replica_only=True)
    except Exception as found:  # any: the other ranks would wait in the broadcast
        error = found
    failures = all_gather_object(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise LoadError(f"rank {rank}: {failure}")


def compute_options(config: Config, platform: Platform) -> ComputeOptions:
    """The options of the model's computation that the configuration names. Collective."""
    trainer = config.trainer
    return ComputeOptions(
        recompute=_choose_recompute(config),
        layers=choose_layers(platform) if trainer.layers == "auto" else cast(LayerImplementation, trainer.layers),
        attention=cast(AttentionKernel, trainer.attention),
        experts=cast(ExpertKernel, trainer.experts),
        compile_pointwise=choose_compilation(platform, getattr(torch, config.model.dtype)),
        train_vision=trainer.train_vision,
        value_head=_value_head(trainer.critic),
    )


def describe_fusions(options: ComputeOptions) -> str:
    """Describe the fused kernels and their library."""
    library = "Transformer Engine" if options.layers == "transformer_engine" else "PyTorch"
    return (
        f"fused: weight gradients added to float32 buffers in the products ({library}; head and experts: PyTorch), "
        f"rotary embedding ({library}), SwiGLU and the vision tower's rotary embedding "
        f"({'compiled' if options.compile_pointwise else 'PyTorch'})"
    )


def _choose_recompute(config: Config) -> Recompute:
    recompute = choose_recompute(config, read_model_config(config.model.path))
    if config.trainer.recompute == "auto" and torch.distributed.get_rank() == 0:
        log.info("trainer.recompute=auto recomputes %s by the memory estimate", recompute)
    return recompute


def _value_head(critic: CriticConfig | None) -> ValueHeadKind:
    if critic is None:
        return "none"
    return "shared" if critic.train_trunk else "detached"


def choose_layers(platform: Platform) -> LayerImplementation:
    """The layers of trainer.layers=auto, equal on all ranks. Collective."""
    problem = _first_problem(_transformer_engine_problem(platform))
    layers: LayerImplementation = "local" if problem else "transformer_engine"
    if torch.distributed.get_rank() == 0:
        log.info("trainer.layers=auto takes %s layers%s", layers, problem and f"; {problem}")
    return layers


def choose_compilation(platform: Platform, dtype: torch.dtype) -> bool:
    """Whether SwiGLU and the vision tower's rotary embedding are compiled, equal on all ranks: on CUDA, if that works.

    Collective.
    """
    if platform.name != "cuda":
        return False
    problem = _first_problem(compilation_problem((swiglu.example, vision.example), platform.device, dtype))
    if problem and torch.distributed.get_rank() == 0:
        log.warning("SwiGLU and the vision tower's rotary embedding are not compiled: %s", problem)
    return not problem


def _first_problem(problem: str) -> str:
    """First problem over all ranks, with its rank; empty without one. Collective."""
    problems = enumerate(all_gather_object(problem))
    return next((f"rank {rank}: {found}" for rank, found in problems if found), "")


def _transformer_engine_problem(platform: Platform) -> str:
    """Why this rank cannot compute with Transformer Engine; empty if it can."""
    if platform.name != "cuda":
        return f"the platform is {platform.name}"
    if platform.transformer_engine_problem:
        return platform.transformer_engine_problem
    try:
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        return f"{type(error).__name__}: {first_line(error)[:200]}"
    return ""


def make_sequence_packer(config: Config, platform: Platform, timeline: Timeline = OFF) -> SequencePacker:
    """Make this rank's sequence packer, without an image cache. The process groups must exist."""
    trainer, processor, wait_timer = config.trainer, Processor.load(config.model.path), WaitTimer(timeline)
    encodes_images = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    return SequencePacker(
        processor=processor,
        max_tokens=trainer.tokens_per_microbatch,
        device=platform.device,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        flops_estimator=FlopsEstimator.from_hf_config(load_hf_config(config.model.path), trainer.train_vision),
        # Megatron's interleaved schedule takes micro-batches in rounds of one per stage.
        microbatch_multiple=trainer.pipeline_parallel if trainer.virtual_pipeline > 1 else 1,
        merge_prefixes=choose_prefix_merging(trainer.merge_prefixes, read_model_config(config.model.path)),
        replays_routing=replays_routing(config),
        encodes_images=encodes_images,
        image_rank=get_pg_rank(parallel_state.get_tensor_and_context_parallel_group()),
        num_image_ranks=trainer.tensor_parallel * trainer.context_parallel,
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=trainer.context_parallel,
        token_multiple=trainer.tensor_parallel,  # sequence parallelism
        prefetcher=make_image_prefetcher(config, processor, platform.device, wait_timer) if encodes_images else None,
        wait_timer=wait_timer,
    )


def make_image_prefetcher(
    config: Config, processor: Processor, device: torch.device, wait_timer: WaitTimer
) -> ImagePrefetcher | None:
    """Threads that prepare images, as trainer.image_workers says; None with 0."""
    threads = config.trainer.image_workers
    if not threads:
        return None
    cut = processor.patchifier
    buffer_bytes = image_buffer_mib(config, cut.patch_size, cut.merge_size) * 2**20
    return ImagePrefetcher(processor, device, threads, buffer_bytes, wait_timer)
