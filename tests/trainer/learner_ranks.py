"""Rank bodies of the learner tests; each rank writes its observations to a file."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.types import Action, Group, Step, Task, Trajectory
from megatron_webrl.util import torchvision_shim
from tests.gloo import layouts
from tests.trajectories import screenshot

VERSION = 2


def run(rank: int, folder: str, model: str) -> None:
    """Tensor-parallel 2 first, then tensor-parallel 1 with two replicas, in the same processes."""
    torchvision_shim.install()
    for size, platform in layouts(rank, folder):
        found = _examine(make_config(model), Path(folder), size, platform)
        torch.save(found, f"{folder}/found-{size}-{rank}.pt")


def make_config(model: str) -> Config:
    """Two minibatches, two epochs, a high learning rate."""
    config = Config()
    config.model.path = model
    config.trainer.updates, config.trainer.epochs, config.trainer.minibatches = 4, 2, 2
    config.trainer.tokens_per_microbatch = 256
    config.trainer.optimizer.learning_rate = 3e-3
    return config


def make_learner(config: Config, platform: Any, *, with_weights: bool = True) -> Any:
    """A learner with a large epsilon of Adam: a step depends on the size of the gradient, not only on its sign."""
    from megatron_webrl.trainer import main
    from megatron_webrl.trainer.optimizer import make_optimizer

    chunks, trainer = main.load_model(config, platform, with_weights=with_weights), config.trainer
    dtype = getattr(torch, config.model.dtype)
    optimizer = make_optimizer(chunks, trainer.optimizer, trainer.optimizer_steps, dtype, epsilon=1e-3)
    return replace(main.make_learner(config, chunks), optimizer=optimizer)


def make_groups(config: Config, count: int = 4) -> list[Group]:
    """Groups of two with one image a step, the engine's numbers taken from the model itself."""
    from megatron_webrl.model.processor import Processor

    processor = Processor.load(config.model.path)
    return [
        Group(ticket, tuple(_trajectory(processor, ticket, index) for index in range(2))) for ticket in range(count)
    ]


def _trajectory(processor: Any, ticket: int, index: int) -> Trajectory:
    rng = np.random.default_rng((ticket, index))
    steps = 1 + (ticket + index) % 2
    images = tuple(screenshot(100 * ticket + 10 * index + i, 160, 224) for i in range(steps))
    return Trajectory(
        ticket=ticket,
        index=index,
        group_size=2,
        restart_epoch=0,
        task=Task(f"t{ticket}", "miniwob", "click-test", ticket, 5),
        instruction="Click.",
        steps=tuple(_step(processor, rng, images, i) for i in range(steps)),
        images=images,
        reward=float(index == ticket % 2),
        outcome="success" if index == ticket % 2 else "failure",
        temperature=1.0,
        seconds=1.0,
        finished_at=float(ticket),
    )


def _step(processor: Any, rng: np.random.Generator, images: tuple[bytes, ...], i: int) -> Step:
    content = [{"type": "text", "text": f"Step {i}."}, *[{"type": "image"} for _ in range(i + 1)]]
    grids = processor.grids(images[: i + 1])
    response = processor.encode_response(" ".join(rng.choice(["click", "type", "wait", "answer"], 4)))
    if i == 1:  # the policy may produce the token that stands for images in prompts
        response = np.insert(response, 1, processor.image_token_id).astype(np.int32)
    return Step(
        prompt_token_ids=processor.expand_image_tokens(
            processor.encode_chat([{"role": "user", "content": content}]), grids
        ),
        response_token_ids=response,
        logprobs=np.full(len(response), -6.0, np.float32),
        versions=np.full(len(response), VERSION, np.int32),
        images=np.arange(i + 1, dtype=np.int32),
        image_grids=grids,
        finish_reason="stop",
        action=Action("wait"),
    )


def _examine(config: Config, folder: Path, size: int, platform: Any) -> dict[str, Any]:
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState, read_trainer_state
    from tests.model.hf_export import hf_tensors

    config.trainer.tensor_parallel, config.trainer.data_parallel = size, 2 // size
    learner, groups = make_learner(config, platform), make_groups(config)
    found: dict[str, Any] = {"first": _update(learner, config, platform, groups)}
    state = TrainerState(VERSION + 1, 0, 4, (5,), Accounting(trained=8).state_dict(), 1, episode_log_bytes=77)
    run_folder = folder / f"run-{size}"
    checkpoints = Checkpointer(run_folder / "checkpoints", Path(config.model.path), config.trainer.checkpoint)
    checkpoints.start_save(learner, state)
    found["second"] = _update(learner, config, platform, groups)
    checkpoints.close()
    found["weights"] = {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}
    found["rate"] = learner.optimizer.learning_rate
    restored = make_learner(config, platform, with_weights=False)
    found["changes"] = load_learner(latest_checkpoint(run_folder), restored)
    found["state"] = read_trainer_state(latest_checkpoint(run_folder))
    found["second again"], found["pixels"] = _update_ahead(restored, config, platform, groups, folder)
    found["weights again"] = {name: tensor.clone() for name, tensor in hf_tensors(restored.models)}
    found["rate again"] = restored.optimizer.learning_rate
    if size == 1:
        other = make_learner(config, platform)
        load_learner(latest_checkpoint(folder / "run-2"), other)
        found["second elsewhere"] = _update(other, config, platform, groups)
        found["rates"] = _rates(make_learner(config, platform), config.trainer.epochs * config.trainer.minibatches)
        found["changed rates"], found["other changes"] = _resume_with_another_schedule(config, platform, run_folder)
    found["single"] = _single_step(config, platform, groups)
    return found


def _resume_with_another_schedule(config: Config, platform: Any, run_folder: Path) -> tuple[list[float], list[str]]:
    """Rates of the next step after a resume and without one, and the changes that the resume names."""
    from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    changed = copy.deepcopy(config)
    changed.trainer.optimizer.learning_rate *= 2
    changed.trainer.optimizer.schedule, changed.trainer.updates = "linear", 3 * config.trainer.updates
    resumed, fresh = make_learner(changed, platform), make_learner(changed, platform)
    changes = load_learner(latest_checkpoint(run_folder), resumed)
    fresh.optimizer.scheduler.step(config.trainer.epochs * config.trainer.minibatches)
    return [resumed.optimizer.learning_rate, fresh.optimizer.learning_rate], changes


def _rates(learner: Any, count: int) -> list[float]:
    """Learning rates of the next steps; they are not made."""
    rates = []
    for _ in range(count):
        rates.append(learner.optimizer.learning_rate)
        learner.optimizer.scheduler.step(1)
    return rates


def _update(learner: Any, config: Config, platform: Any, groups: list[Group]) -> tuple[dict[str, float], Any]:
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer

    return train_batch(learner, make_sequence_packer(config, platform), config, groups, VERSION)


def _update_ahead(
    learner: Any, config: Config, platform: Any, groups: list[Group], folder: Path
) -> tuple[tuple[dict[str, float], Any], dict[str, float]]:
    """An update with prefetched images, in a buffer smaller than all of them together."""
    from megatron_webrl.trainer import main as factory
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer

    config.run.directory, config.trainer.image_workers = str(folder), 1
    factory.image_buffer_mib = lambda *_: 1
    builder = make_sequence_packer(config, platform)
    assert builder.prefetcher is not None
    result = train_batch(learner, builder, config, groups, VERSION)
    held, jobs = builder.prefetcher.used_bytes, builder.prefetcher.started_images
    builder.close()
    return result, {"held": held, "jobs": jobs}


def _tokens(learner: Any, microbatches: list[Any], objective: Any) -> dict[str, Any]:
    """Metrics of a pass far enough from its proximal policy for some tokens to be clipped, and this rank's tokens."""
    proximal = [logprobs - 0.5 for logprobs in learner.compute_logprobs(microbatches)]
    metrics, current = learner.forward_backward(microbatches, proximal, objective)
    fields = ("behaviour_logprobs", "advantage", "weight", "succeeded")
    arrays = {name: torch.cat([getattr(each, name) for each in microbatches]).numpy() for name in fields}
    return {"metrics": metrics, **arrays, "current": torch.cat(current).numpy()}


def _mismatch(microbatches: Any) -> dict[str, Any]:
    """Tokens of lags 0 to 6, and some of no version, whose log-probabilities differ by up to 0.16."""
    from megatron_webrl.trainer.data.batching import NO_VERSION
    from megatron_webrl.trainer.metrics.logprob_mismatch import measure_logprob_mismatch

    differences = []
    for batch in microbatches:
        numbers = torch.arange(len(batch.versions), device=batch.versions.device)
        batch.versions[:] = torch.where(numbers % 5 == 0, NO_VERSION, 7 - numbers % 7)
        differences.append(0.08 * (numbers % 5 - 2).float())
    logprobs = [batch.behaviour_logprobs + each for batch, each in zip(microbatches, differences, strict=True)]
    return {
        "found": measure_logprob_mismatch(microbatches, logprobs, 7),
        "versions": torch.cat([batch.versions for batch in microbatches]).numpy(),
        "differences": torch.cat(differences).numpy(),
        "counted": torch.cat([batch.weight > 0 for batch in microbatches]).numpy(),
    }


def _single_step(config: Config, platform: Any, groups: list[Group]) -> dict[str, Any]:
    """One minibatch, one epoch; then a replica without samples, and a gradient that is not finite."""
    from megatron_webrl.trainer.data import batching
    from megatron_webrl.trainer.loss.objective import make_objective
    from megatron_webrl.trainer.main import make_sequence_packer
    from megatron_webrl.trainer.optimizer import NonFiniteGradient
    from tests.model.hf_export import hf_tensors

    config.trainer.epochs = config.trainer.minibatches = 1
    learner, builder = make_learner(config, platform), make_sequence_packer(config, platform)
    objective = make_objective(config.trainer.loss, None)
    found: dict[str, Any] = {"all": _update(learner, config, platform, groups)}
    sample = batching.make_samples(groups)[:1]
    metrics, _ = learner.train_step(builder.build(sample, "token_mean", 10), None, objective)
    found["one sample"] = metrics
    found["small gradient"], _ = learner.train_step(builder.build(sample, "constant", 1000), None, objective)
    found["tokens"] = _tokens(learner, builder.build(batching.make_samples(groups), "token_mean", 10), objective)
    found["mismatch"] = _mismatch(builder.build(batching.make_samples(groups), "token_mean", 10))
    before = {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}
    broken = builder.build(batching.make_samples(groups), "token_mean", 10)
    for row in broken:
        row.advantage[0] = float("nan")
    try:
        learner.train_step(broken, None, objective)
    except NonFiniteGradient as error:
        found["error"] = str(error)
    found["unchanged"] = all(torch.equal(before[name], tensor) for name, tensor in hf_tensors(learner.models))
    return found
