"""One trainer rank: build the objects of a job, each once and complete; run the loop; shut down."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from megatron.core import parallel_state

from megatron_webrl.config.advantage import CriticConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.model.build import LoadError, build_model, load_hf
from megatron_webrl.model.compute_options import (
    AttentionKernel,
    ComputeOptions,
    LayerImplementation,
    ValueHeadKind,
)
from megatron_webrl.model.hf_config import choose_prefix_merging, load_hf_config, read_model_config
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.processor import Processor
from megatron_webrl.model.vision_language import norm, swiglu, vision
from megatron_webrl.model.vision_language.compilation import compilation_problem
from megatron_webrl.model.vision_language.model import VisionLanguageModel
from megatron_webrl.model.vision_language.routing_replay import replay_obstacle, replays_routing
from megatron_webrl.placement.memory_estimate import choose_recompute, image_buffer_mib
from megatron_webrl.placement.placement import RankInfo
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch, LaunchLost, launch_of_process
from megatron_webrl.track.timeline import OFF, Timeline, open_timeline
from megatron_webrl.trainer import parallel
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint, needs_initial_weights
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner, load_weights
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.data.packing import FlopsEstimator
from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.evaluation_scheduler import EvaluationScheduler
from megatron_webrl.trainer.images import ImagePrefetcher, WaitTimer
from megatron_webrl.trainer.learner import Learner, ReferencePolicy
from megatron_webrl.trainer.loop import TrainingContext, train
from megatron_webrl.trainer.multi_node.exchange import make_exchange
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology
from megatron_webrl.trainer.multi_node.screenshots import ImageCache
from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp
from megatron_webrl.trainer.parallel import all_gather_object, broadcast_object
from megatron_webrl.trainer.reference import make_reference
from megatron_webrl.trainer.warm_start import warm_start
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.util import torchvision_shim

log = logging.getLogger(__name__)


def run(config: Config, control: ControlClient, rank: RankInfo, node_ring: NodeRing, attempt: int = 0) -> None:
    """Run one trainer rank until the job ends. Attempt 0 starts as run.resume says, others from a checkpoint if any."""
    torchvision_shim.install()
    control.start_heartbeat()
    with open_timeline(config, control.role, node_ring.node) as timeline:
        _run(config, control, rank, node_ring, attempt, timeline)


def _run(
    config: Config, control: ControlClient, rank: RankInfo, node_ring: NodeRing, attempt: int, timeline: Timeline
) -> None:
    control.report_status("loading the model" if attempt == 0 else f"loading the model, attempt {attempt + 1}")
    is_first = rank.rank == 0
    platform = parallel.initialize(config, rank, control, f"{node_ring.job_id}/{attempt}")
    launch = broadcast_object(_launch(config) if is_first else None)
    checkpoint = broadcast_object(_starting_checkpoint(config, attempt) if is_first else None)
    config = replace(config, run=replace(config.run, resume=checkpoint is not None))
    state = _initial_state(checkpoint)
    nodes = NodeTopology.all_gather(node_ring.node, config.cluster.nodes)
    exchange = make_exchange(node_ring.attach(config.run.startup_timeout_seconds), nodes, config)
    packer = make_sequence_packer(config, platform, timeline, exchange.image_cache)
    chunks = load_model(config, platform, with_weights=broadcast_object(needs_initial_weights(config)))
    if not config.run.resume and config.trainer.warm_start.demonstrations:
        warm_start(chunks, packer, config, control)
    reference = make_reference(chunks, config)
    learner = make_learner(config, chunks, reference, timeline, control.report_progress)
    if checkpoint is not None and (changes := load_learner(checkpoint, learner)) and is_first:
        reason = f"the configuration's holds from {checkpoint.name} on, which was trained with {'; '.join(changes)}"
        log.warning("the schedule has changed: %s", reason)
        EventLog(config.run_folder, nodes.node).add("trainer-0", "schedule changed", reason)
    tracker = None
    if is_first:  # all attempts of a job write to one MLflow run
        from megatron_webrl.track.upload import Tracker

        tracker = Tracker(config)
    resume_point = make_resume_point(control, exchange, state, config.run_folder, is_first)
    control.report_status("waiting for the engines")
    syncer = WeightSyncer(learner.models, config, control, platform, timeline)
    coordinator = Coordinator(config, control, exchange, state, resume_point, tracker, launch)
    evaluations = EvaluationScheduler(config, control, coordinator.evaluation_log, resume_point.restart_epoch)
    replay = ReplayBuffer(config, exchange, state.version)
    # Megatron runs the garbage collector for each checkpoint; frozen objects of imported modules are not scanned.
    gc.collect()
    gc.freeze()
    try:
        train(TrainingContext(config, learner, packer, syncer, coordinator, replay, evaluations, version=state.version))
    except BaseException:
        if tracker is not None:
            tracker.close("FAILED", seconds=2.0)  # the launcher of a trainer that failed waits only shortly
        raise
    finally:
        packer.close()  # otherwise the process would end after all images that wait for a thread
    control.close()
    exchange.close()
    parallel.shutdown()


def _launch(config: Config) -> Launch | None:
    """The launch of this job. Raises JobFailed if another launch has taken over."""
    try:
        return launch_of_process(config.run_folder, os.environ)
    except LaunchLost as error:
        raise JobFailed(str(error)) from None


def _starting_checkpoint(config: Config, attempt: int) -> Path | None:
    """The checkpoint to start from; None to start from the model. Raises CheckpointError."""
    if config.run.resume or (attempt and find_latest_checkpoint(config.run_folder) is not None):
        return latest_checkpoint(config.run_folder)
    return None


def _initial_state(checkpoint: Path | None) -> TrainerState:
    """The state of a fresh run, or that of the checkpoint in a new restart epoch."""
    if checkpoint is None:
        return TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
    state = read_trainer_state(checkpoint)
    return replace(state, restart_epoch=state.restart_epoch + 1)


def load_model(config: Config, platform: Platform, with_weights: bool = True, trainable: bool = True) -> list[Any]:
    """The model's chunks in DistributedDataParallel, one per virtual pipeline stage of this rank. Collective.

    Weights are read from storage by the first data-parallel replica and broadcast to the others; without `with_weights`
    they are arbitrary until a checkpoint is loaded. Parameters that are not `trainable` have no buffers of gradients, 4
    bytes each. Raises LoadError or CheckpointError on every rank.
    """
    started, options = time.monotonic(), compute_options(config, platform)
    chunks = build_model(
        config.model.path, dtype=getattr(torch, config.model.dtype), platform=platform, options=options
    )
    if with_weights and not config.model.checkpoint:
        _load_first_replicas(chunks, config.model.path)
    for chunk in chunks if not trainable else ():
        chunk.requires_grad_(False)
    wrapped: list[Any] = wrap_ddp(chunks)  # broadcasts the parameters
    if with_weights and config.model.checkpoint:
        load_weights(Path(config.model.checkpoint), wrapped)
    log.info("model loaded in %.1f s", time.monotonic() - started)
    return wrapped


def make_learner(
    config: Config,
    chunks: list[Any],
    reference: ReferencePolicy | None = None,
    timeline: Timeline = OFF,
    report_progress: Callable[[], None] = lambda: None,
) -> Learner:
    """The learner of a loaded model, with a fresh optimiser. Raises MissingLibraryError."""
    dtype = getattr(torch, config.model.dtype)
    optimizer = make_optimizer(chunks, config.trainer.optimizer, config.trainer.optimizer_steps, dtype)
    return Learner(chunks, chunks[0].module.unpadded_vocab_size, optimizer, reference, timeline, report_progress)


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
    recompute = choose_recompute(config, read_model_config(config.model.path))
    if trainer.recompute == "auto" and torch.distributed.get_rank() == 0:
        log.info("trainer.recompute=auto recomputes %s by the memory estimate", recompute)
    return ComputeOptions(
        recompute=recompute,
        layers=cast(LayerImplementation, trainer.layers),
        attention=cast(AttentionKernel, trainer.attention),
        compile_pointwise=choose_compilation(platform, getattr(torch, config.model.dtype)),
        train_vision=trainer.train_vision,
        float32_head=config.model.float32_head,
        value_head=_value_head(trainer.critic),
    )


def _value_head(critic: CriticConfig | None) -> ValueHeadKind:
    if critic is None:
        return "none"
    return "shared" if critic.train_trunk else "detached"


def choose_compilation(platform: Platform, dtype: torch.dtype) -> bool:
    """Whether norms, SwiGLU and the tower's rotary embedding are compiled, equal on all ranks: on CUDA, if that works.

    Collective.
    """
    if platform.name != "cuda":
        return False
    examples = (norm.example, swiglu.example, vision.example)
    problems = all_gather_object(compilation_problem(examples, platform.device, dtype))
    problem = next((f"rank {rank}: {found}" for rank, found in enumerate(problems) if found), "")
    if problem and torch.distributed.get_rank() == 0:
        log.warning("norms, SwiGLU and the vision tower's rotary embedding are not compiled: %s", problem)
    return not problem


def make_sequence_packer(
    config: Config, platform: Platform, timeline: Timeline = OFF, image_cache: ImageCache | None = None
) -> SequencePacker:
    """Make this rank's sequence packer. The process groups must exist. `image_cache`: that of the exchange."""
    trainer, processor, wait_timer = config.trainer, Processor.load(config.model.path), WaitTimer(timeline)
    image_rank = parallel.image_rank()
    if (obstacle := replay_obstacle(config)) and torch.distributed.get_rank() == 0:
        log.warning("the experts of the engine are not replayed, tokens may pass through others: %s", obstacle)
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
        image_rank=image_rank,
        num_image_ranks=trainer.tensor_parallel * trainer.context_parallel,
        context_parallel_rank=parallel_state.get_context_parallel_rank(),
        context_parallel_size=trainer.context_parallel,
        token_multiple=trainer.tensor_parallel,  # sequence parallelism
        prefetcher=(
            None if image_rank is None else make_image_prefetcher(config, processor, platform.device, wait_timer)
        ),
        image_cache=image_cache,
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
