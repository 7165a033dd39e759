"""Entry point of one trainer rank: build everything the loop needs, run it, shut down."""

from __future__ import annotations

import gc
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.placement.placement import RankInfo
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.track.events import EventLog
from megatron_webrl.track.latest_checkpoint import fallback_of, find_latest_checkpoint
from megatron_webrl.track.run_lock import Launch, LaunchLost, launch_of_process
from megatron_webrl.track.timeline import Timeline, open_timeline
from megatron_webrl.trainer import parallel
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
from megatron_webrl.trainer.checkpoint.fallback import restore_histories
from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
from megatron_webrl.trainer.checkpoint.resume_check import needs_initial_weights
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.data.batching import training_samples
from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer
from megatron_webrl.trainer.evaluation_scheduler import EvaluationScheduler
from megatron_webrl.trainer.factory import make_learner, make_sequence_packer
from megatron_webrl.trainer.loop import TrainingContext, train
from megatron_webrl.trainer.multi_node.exchange import make_exchange
from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology
from megatron_webrl.trainer.reference import attach_reference_policy
from megatron_webrl.trainer.warm_start import warm_start
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.util import torchvision_shim

if TYPE_CHECKING:
    from megatron_webrl.track.mlflow_upload import MLflowTracker

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
    launch, fallback = parallel.broadcast_object(_launch(config) if is_first else (None, None))
    checkpoint = parallel.broadcast_object(_starting_checkpoint(config, attempt) if is_first else None)
    config = replace(config, run=replace(config.run, resume=checkpoint is not None))
    state = _initial_state(checkpoint)
    if is_first:
        restore_histories(config.run_folder, state)
    nodes = NodeTopology.all_gather(node_ring.node, config.cluster.nodes)
    with_weights = parallel.broadcast_object(needs_initial_weights(config))
    learner = make_learner(
        config, platform, with_weights=with_weights, timeline=timeline, report_progress=control.report_progress
    )
    packer = make_sequence_packer(config, platform, timeline)
    if not config.run.resume and config.trainer.warm_start.demonstrations:
        learner = warm_start(learner, packer, config, control)
    learner = attach_reference_policy(learner, config)  # before a checkpoint replaces the initial weights
    if checkpoint is not None and (changes := load_learner(checkpoint, learner)) and is_first:
        reason = f"the configuration's holds from {checkpoint.name} on, which was trained with {'; '.join(changes)}"
        log.warning("the schedule has changed: %s", reason)
        EventLog(config.run_folder, nodes.node).add("trainer-0", "schedule changed", reason)
    exchange = make_exchange(node_ring.attach(config.run.startup_timeout_seconds), nodes, config, packer)
    packer = replace(packer, image_cache=exchange.image_cache)  # a warm start has its images at hand
    tracker = _make_tracker(config) if is_first else None
    resume_point = make_resume_point(control, exchange, state, config.run_folder, is_first)
    control.report_status("waiting for the engines")
    syncer = WeightSyncer(learner.models, config, control, platform, timeline)
    coordinator = Coordinator(
        config, control, exchange, state, resume_point, tracker,
        on_ready=lambda group: packer.prefetch(training_samples([group], config, 0)), launch=launch, fallback=fallback,
    )  # fmt: skip
    evaluations = EvaluationScheduler(config, control, coordinator.evaluation_log, resume_point.restart_epoch)
    replay = ReplayBuffer(config, exchange)
    # Megatron runs the garbage collector for each checkpoint; frozen objects of imported modules are not scanned.
    gc.collect()
    gc.freeze()
    try:
        train(TrainingContext(config, learner, packer, syncer, coordinator, replay, evaluations, version=state.version))
    except BaseException:
        if tracker is not None:
            tracker.close_failed()
        raise
    finally:
        packer.close()  # otherwise the process would end after all images that wait for a thread
    control.close()
    exchange.close()
    parallel.shutdown()


def _launch(config: Config) -> tuple[Launch | None, Path | None]:
    """The launch of this job, and the run's fallback folder. Raises JobFailed if another launch has taken over."""
    try:
        launch = launch_of_process(config.run_folder, os.environ)
        return launch, fallback_of(config.run_folder, config.trainer.checkpoint.fallback_folder)
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


def _make_tracker(config: Config) -> MLflowTracker:
    """The tracker of the run, on the first rank only. All attempts of a job write to one MLflow run."""
    from megatron_webrl.track.mlflow_upload import MLflowTracker

    return MLflowTracker(config)
