"""One rank of the trainer role, from nothing to the loop."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.system import torchvision_shim
from megatron_webrl.tracking.mlflow_run import MLflowTracker
from megatron_webrl.trainer import parallel
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint import checkpointer
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState
from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
from megatron_webrl.trainer.checkpoint.reference_files import attach_reference_policy
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.data.batching import training_samples
from megatron_webrl.trainer.data.replay_buffer import ReplayBuffer
from megatron_webrl.trainer.data.sequence_packer import SequencePacker
from megatron_webrl.trainer.evaluation_scheduler import EvaluationScheduler
from megatron_webrl.trainer.exchange.multi_node_exchange import MultiNodeExchange, make_exchange
from megatron_webrl.trainer.exchange.node_topology import NodeTopology
from megatron_webrl.trainer.factory import make_learner, make_sequence_packer, with_image_prefetcher
from megatron_webrl.trainer.loop import TrainingContext, train
from megatron_webrl.trainer.parallel import RankInfo
from megatron_webrl.trainer.warm_start import warm_start
from megatron_webrl.trainer.weight_sync import WeightSyncer

_MLFLOW_RUN = "tracking/mlflow_run"


def run(config: Config, control: ControlClient, rank: RankInfo, node_ring: NodeRing, attempt: int = 0) -> None:
    """Run one trainer rank until the job has ended. `attempt`: how often the ranks were started before in this job.

    The first attempt begins as run.resume says, later ones from the newest checkpoint, if there is one.
    """
    torchvision_shim.install()
    control.start_heartbeat()
    control.report_status("loading the model" if attempt == 0 else f"loading the model, attempt {attempt + 1}")
    platform = parallel.initialize(config, rank, control.store, f"{node_ring.job_id}/{attempt}")
    source = parallel.broadcast_object(_checkpoint(config, attempt) if rank.rank == 0 else None)
    config = replace(config, run=replace(config.run, resume=source is not None))
    state = _state(source)
    nodes = NodeTopology.all_gather(node_ring.node, config.cluster.nodes)
    learner = replace(make_learner(config, platform), report_progress=control.report_progress)
    builder = with_image_prefetcher(make_sequence_packer(config, platform), config, rank.rank)
    if not config.run.resume and config.trainer.warm_start.demonstrations:
        learner = warm_start(learner, builder, config, control)
    learner = attach_reference_policy(
        learner, config
    )  # before a checkpoint takes the place of the weights that RL began with
    if source is not None:
        checkpointer.load(source, learner)
    rings = make_exchange(node_ring.attach(config.run.startup_timeout_seconds), nodes, config, builder)
    if isinstance(rings, MultiNodeExchange):
        builder = replace(builder, image_cache=rings.image_cache)
    tracker = _tracker(config, control, state, builder) if rank.rank == 0 else None
    beginning = make_resume_point(control, rings, state, config.run_folder, rank.rank == 0)
    control.report_status("waiting for the engines")
    publisher = WeightSyncer(learner.models, config, control, platform)
    coordinator = Coordinator(
        config, control, rings, state, beginning, tracker,
        lambda group: builder.prefetch(training_samples([group], config, 0)),
    )  # fmt: skip
    evaluation = EvaluationScheduler(config, control, tracker, beginning.ticket_epoch.restart_epoch, state.version)
    # Megatron collects garbage for each checkpoint, and would look at every imported module's objects again.
    gc.collect()
    gc.freeze()
    try:
        replay = ReplayBuffer(config, rings)
        train(TrainingContext(config, learner, builder, publisher, coordinator, replay, evaluation, state.version))
    except BaseException:
        if tracker is not None:
            tracker.close("FAILED")
        raise
    control.close()
    rings.close()
    builder.close()
    parallel.shutdown()


def _checkpoint(config: Config, attempt: int) -> Path | None:
    """What to begin with; None for a beginning without a checkpoint. Raises CheckpointError."""
    folder = config.run_folder / "checkpoints"
    return (
        checkpointer.latest_checkpoint(folder)
        if config.run.resume or (attempt and (folder / "latest").is_file())
        else None
    )


def _state(source: Path | None) -> TrainerState:
    """Where this incarnation begins."""
    if source is None:
        return TrainerState(0, 0, 0, (), Accounting().state_dict(), 0)
    state = checkpointer.read_trainer_state(source)
    return replace(state, restart_epoch=state.restart_epoch + 1)


def _tracker(config: Config, control: ControlClient, state: TrainerState, builder: SequencePacker) -> MLflowTracker:
    """All attempts of a job write the same MLflow run, also before its first checkpoint."""
    known = control.get_json(_MLFLOW_RUN) or state.mlflow_run_id
    tracker = MLflowTracker(config, known if isinstance(known, str) else None, builder.processor.decode)
    control.put_json(_MLFLOW_RUN, tracker.run_id)
    return tracker
