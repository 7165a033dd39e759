"""What training needs to resume from a checkpoint. Imports no torch: a launch checks it, too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.config.trainer import TrainerConfig
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError

CRITIC_HINT = (
    "a run has a critic (trainer.advantage.name=critic) from its start or not at all: leave it as it was, or start "
    "another run from the weights (model.checkpoint)"
)


def needs_initial_weights(config: Config) -> bool:
    """Whether a start reads model.checkpoint or the weights of model.path.

    A resumed one needs them only as the reference of the KL penalty, unless a warm start has stored that.
    """
    if not config.run.resume:
        return True
    return config.trainer.loss.kl_coefficient > 0 and not config.reference_weights_folder.exists()


def check_resumable(checkpoint: Path, trainer: TrainerConfig) -> None:
    """Raises CheckpointError if a setting has another value than the checkpoint needs, as its state.json says."""
    path = checkpoint / "state.json"
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if state.get("optimizer_shards") == "ranks":
        check_same_model_parallel(state["layout"], _configured_layout(trainer), checkpoint)
    if state.get("has_critic") not in (None, trainer.critic is not None):
        has = "has a critic" if state["has_critic"] else "has no critic"
        raise CheckpointError(f"{checkpoint} {has}, but trainer.advantage.name={trainer.advantage.name}; {CRITIC_HINT}")


def check_same_model_parallel(stored: Mapping[str, int], layout: Mapping[str, int], folder: Path) -> None:
    """Raises CheckpointError unless only the number of replicas differs from the checkpoint's layout."""
    for name, size in layout.items():
        if name != "ranks" and stored[name] != size:
            raise CheckpointError(
                f"{folder} was saved with trainer.checkpoint.optimizer_shards=ranks and {name} size {stored[name]}, "
                f"not {size}: resume with the same sizes and any number of replicas, or start a run from its weights "
                "(model.checkpoint)"
            )


def _configured_layout(trainer: TrainerConfig) -> dict[str, int]:
    """The sizes that `parallel_layout` of a trainer rank will have, without the number of ranks."""
    return {
        "tensor": trainer.tensor_parallel,
        "pipeline": trainer.pipeline_parallel,
        "virtual_pipeline": trainer.virtual_pipeline,
        "context": trainer.context_parallel,
        "expert": trainer.expert_parallel,
        "expert_tensor": trainer.expert_tensor_parallel,
    }
