"""One rank of the trainer role, from nothing to the loop."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

from megatron_webrl import compat
from megatron_webrl.config import Config
from megatron_webrl.control import Control
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.tracking.mlflow_run import Tracker
from megatron_webrl.trainer import checkpoint, parallel
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.batching import training_samples
from megatron_webrl.trainer.build import make_builder, make_learner, with_pixels_ahead
from megatron_webrl.trainer.checkpoint import TrainerState
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.evaluation import Evaluation
from megatron_webrl.trainer.loop import Trainer, train
from megatron_webrl.trainer.node_rings import NodeRings, join_rings
from megatron_webrl.trainer.nodes import Nodes
from megatron_webrl.trainer.parallel import Rank
from megatron_webrl.trainer.publish import Publisher
from megatron_webrl.trainer.reference_files import with_reference
from megatron_webrl.trainer.replay import Replay
from megatron_webrl.trainer.rows import RowBuilder
from megatron_webrl.trainer.takeover import begin
from megatron_webrl.trainer.warm_start import warm_start

_MLFLOW_RUN = "tracking/mlflow_run"


def run(config: Config, control: Control, rank: Rank, place: NodeRing, attempt: int = 0) -> None:
    """Run one trainer rank until the job has ended. `attempt`: how often the ranks were started before in this job.

    The first attempt begins as run.resume says, later ones from the newest checkpoint, if there is one.
    """
    compat.install()
    control.start_heartbeat()
    control.report("loading the model" if attempt == 0 else f"loading the model, attempt {attempt + 1}")
    platform = parallel.initialize(config, rank, control.store, f"{place.run_id}/{attempt}")
    source = parallel.broadcast_object(_checkpoint(config, attempt) if rank.rank == 0 else None)
    config = replace(config, run=replace(config.run, resume=source is not None))
    state = _state(source)
    nodes = Nodes.meet(place.node, config.cluster.nodes)
    learner = replace(make_learner(config, platform), progress=control.mark)
    builder = with_pixels_ahead(make_builder(config, platform), config, rank.rank)
    if not config.run.resume and config.trainer.warm_start.demonstrations:
        learner = warm_start(learner, builder, config, control)
    learner = with_reference(learner, config)  # before a checkpoint takes the place of the weights that RL began with
    if source is not None:
        checkpoint.load(source, learner)
    rings = join_rings(place.attach(config.run.start_seconds), nodes, config, builder)
    if isinstance(rings, NodeRings):
        builder = replace(builder, shelf=rings.shelf)
    tracker = _tracker(config, control, state, builder) if rank.rank == 0 else None
    beginning = begin(control, rings, state, config.run_folder, rank.rank == 0)
    control.report("waiting for the engines")
    publisher = Publisher(learner.models, config, control, platform)
    coordinator = Coordinator(
        config, control, rings, state, beginning, tracker,
        lambda group: builder.foresee(training_samples([group], config, 0)),
    )  # fmt: skip
    evaluation = Evaluation(config, control, tracker, beginning.start.incarnation, state.version)
    # Megatron collects garbage for each checkpoint, and would look at every imported module's objects again.
    gc.collect()
    gc.freeze()
    try:
        replay = Replay(config, rings)
        train(Trainer(config, learner, builder, publisher, coordinator, replay, evaluation, state.version))
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
    return checkpoint.latest(folder) if config.run.resume or (attempt and (folder / "latest").is_file()) else None


def _state(source: Path | None) -> TrainerState:
    """Where this incarnation begins."""
    if source is None:
        return TrainerState(0, 0, 0, (), Accounting().state(), 0)
    state = checkpoint.read_state(source)
    return replace(state, incarnation=state.incarnation + 1)


def _tracker(config: Config, control: Control, state: TrainerState, builder: RowBuilder) -> Tracker:
    """All attempts of a job write the same MLflow run, also before its first checkpoint."""
    known = control.value(_MLFLOW_RUN) or state.mlflow_run
    tracker = Tracker(config, known if isinstance(known, str) else None, builder.processor.decode)
    control.put(_MLFLOW_RUN, tracker.run_id)
    return tracker
