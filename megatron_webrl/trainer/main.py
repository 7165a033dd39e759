"""One rank of the trainer role, from nothing to the loop."""

from __future__ import annotations

import gc
from dataclasses import replace

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
from megatron_webrl.trainer.warm_start import warm_start


def run(config: Config, control: Control, rank: Rank, place: NodeRing) -> None:
    """Run one trainer rank until the job has ended."""
    compat.install()
    control.start_heartbeat()
    control.report("loading the model")
    state = _state(config)
    platform = parallel.initialize(config, rank, control.store, f"{place.run_id}/{state.incarnation}")
    nodes = Nodes.meet(place.node, config.cluster.nodes)
    learner = replace(make_learner(config, platform), progress=control.mark)
    builder = with_pixels_ahead(make_builder(config, platform), config, rank.rank)
    if not config.run.resume and config.trainer.warm_start.demonstrations:
        learner = warm_start(learner, builder, config, control)
    learner = with_reference(learner, config)  # before a checkpoint takes the place of the weights that RL began with
    if config.run.resume:
        checkpoint.load(checkpoint.latest(config.run_folder / "checkpoints"), learner)
    rings = join_rings(place.attach(config.run.start_seconds), nodes, config, builder)
    if isinstance(rings, NodeRings):
        builder = replace(builder, shelf=rings.shelf)
    tracker = Tracker(config, state.mlflow_run, builder.processor.decode) if rank.rank == 0 else None
    control.report("waiting for the engines")
    publisher = Publisher(learner.models, config, control, platform)
    coordinator = Coordinator(
        config, control, rings, state, tracker, lambda group: builder.foresee(training_samples([group], config, 0))
    )
    evaluation = Evaluation(config, control, tracker, state.incarnation, state.version)
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


def _state(config: Config) -> TrainerState:
    """Where this incarnation begins."""
    if not config.run.resume:
        return TrainerState(0, 0, 0, (), Accounting().state(), 0)
    state = checkpoint.read_state(checkpoint.latest(config.run_folder / "checkpoints"))
    return replace(state, incarnation=state.incarnation + 1)
