"""What the two gloo processes of the loss-curve tests do: Qwen3-VL in several layouts, from each other's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trainer.checkpoint_ranks import checkpoints_in, session, state_of

QWEN_LAYOUTS: dict[str, dict[str, int]] = {"tensor": {"tensor": 2}, "replicas": {}, "pipeline": {"pipeline": 2}}


def loss_curves(rank: int, folder: str, model: str) -> None:
    """Qwen3-VL in each layout: two updates, a checkpoint, three more; then three more from the checkpoint of each."""
    from megatron_webrl.model import groups
    from megatron_webrl.model.layout import Sizes

    layouts = {name: Sizes(**sizes) for name, sizes in QWEN_LAYOUTS.items()}
    found: dict[Any, Any] = {}
    with session(rank, folder) as platform:
        for name, sizes in layouts.items():
            groups.form(sizes, seed=1)
            learner, update = _qwen(model, sizes, platform)
            checkpoints = checkpoints_in(Path(folder, name))
            for _ in range(2):
                update()
            checkpoints.begin(learner, state_of(2))
            found[name] = [update() for _ in range(3)]
            checkpoints.close()
            groups.dissolve()
        for name, sizes in layouts.items():
            groups.form(sizes, seed=1)
            for other in layouts:
                found[name, other] = _curve_from(Path(folder, other), model, sizes, platform)
            groups.dissolve()
        groups.form(Sizes(), seed=1)
        found["rows"] = {limit: _one_step(model, platform, limit) for limit in (128, 4096)}
        groups.dissolve()
    torch.save(found, f"{folder}/curves-{rank}.pt")


def _curve_from(folder: Path, model: str, sizes: Any, platform: Any) -> list[tuple[float, float]]:
    from megatron_webrl.trainer import checkpoint

    learner, update = _qwen(model, sizes, platform)
    checkpoint.load(folder / "checkpoints" / "version-000002", learner)
    return [update() for _ in range(3)]


def _qwen(model: str, sizes: Any, platform: Any) -> tuple[Any, Any]:
    """A learner, and an update on always the same samples, which returns loss and gradient norm."""
    from megatron_webrl.trainer.build import make_builder, make_learner
    from megatron_webrl.trainer.loop import update
    from tests.trainer import learner_ranks

    config = learner_ranks.make_config(model)
    config.trainer.loss.name, config.trainer.updates = "raft", 5
    config.trainer.tensor_parallel, config.trainer.pipeline_parallel = sizes.tensor, sizes.pipeline
    config.trainer.data_parallel = 2 // (sizes.tensor * sizes.pipeline)
    learner, builder = make_learner(config, platform), make_builder(config, platform)
    samples = learner_ranks.make_groups(config)

    def once() -> tuple[float, float]:
        metrics, _ = update(learner, builder, config, samples, learner_ranks.VERSION)
        return metrics["loss"], metrics["gradient_norm"]

    return learner, once


def _one_step(model: str, platform: Any, limit: int) -> dict[str, Any]:
    """One step on all samples, in rows of at most `limit` tokens."""
    from megatron_webrl.trainer import batching
    from megatron_webrl.trainer.build import make_builder, make_learner
    from megatron_webrl.trainer.learner import objective
    from tests.trainer import learner_ranks

    config = learner_ranks.make_config(model)
    config.trainer.data_parallel, config.trainer.tokens_per_microbatch = 2, limit
    config.trainer.loss.name = "raft"
    learner = make_learner(config, platform)
    config.trainer.merge_prefixes = False
    samples = batching.samples_of(learner_ranks.make_groups(config, 8), batching.imitation)
    rows = make_builder(config, platform).build(samples, "token_mean", 10)
    metrics, _ = learner.step(rows, None, objective(config.trainer.loss))
    weights = torch.cat([p.detach().flatten() for chunk in learner.chunks for p in chunk.parameters()])
    return {"rows": len(rows), "loss": metrics["loss"], "norm": metrics["gradient_norm"], "weights": weights}
