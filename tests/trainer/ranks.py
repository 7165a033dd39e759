"""Gloo processes of the trainer's tests, and what ranks share: a tiny learner, groups, updates, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.types import Action, Group, Step, Task, Trajectory
from megatron_webrl.util import torchvision_shim
from tests import gloo
from tests.trajectories import screenshot

VERSION = 2


def results(
    body: Callable[..., Any], folder: Path, *arguments: Any, ranks: int = 2, seconds: float = 300.0
) -> list[Any]:
    """What `body(platform, folder, *arguments)` returns on each rank; its folder is one below `folder`."""
    own = folder / body.__name__.strip("_")
    own.mkdir(parents=True)
    gloo.spawn(_run, ranks, str(own), body, arguments, ranks=ranks, seconds=seconds)
    return [torch.load(own / f"found-{rank}.pt", weights_only=False) for rank in range(ranks)]


def _run(rank: int, ranks: int, folder: str, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torchvision_shim.install()
    found = body(gloo.join(rank, ranks, folder), Path(folder), *arguments)
    torch.save(found, Path(folder) / f"found-{rank}.pt")
    torch.distributed.destroy_process_group()


@contextmanager
def process_groups(sizes: Any) -> Iterator[None]:
    from megatron_webrl.model import process_groups as groups
    from megatron_webrl.trainer.parallel import parallel_sizes

    groups.init_process_groups(parallel_sizes(sizes) if isinstance(sizes, Config) else sizes, seed=1)
    yield
    groups.destroy_process_groups()


def make_config(model: str | Path, folder: str | Path = "runs", **trainer: Any) -> Config:
    """Two minibatches, two epochs, a high learning rate. `trainer`: more settings of that section."""
    config = Config()
    config.model.path, config.run.directory = str(model), str(folder)
    config.trainer.updates, config.trainer.epochs, config.trainer.minibatches = 4, 2, 2
    config.trainer.tokens_per_microbatch = 256
    config.trainer.optimizer.learning_rate = 3e-3
    for name, value in trainer.items():
        assert hasattr(config.trainer, name)
        setattr(config.trainer, name, value)
    return config


def make_learner(config: Config, platform: Any, *, with_weights: bool = True) -> Any:
    """A learner with a large epsilon of Adam: a step depends on the size of the gradient, not only on its sign."""
    from megatron_webrl.trainer import main
    from megatron_webrl.trainer.optimizer import make_optimizer

    chunks, trainer = main.load_model(config, platform, with_weights=with_weights), config.trainer
    dtype = getattr(torch, config.model.dtype)
    optimizer = make_optimizer(chunks, trainer.optimizer, trainer.optimizer_steps, dtype, epsilon=1e-3)
    return replace(main.make_learner(config, chunks), optimizer=optimizer)


def update(
    learner: Any, config: Config, platform: Any, groups: list[Group] | None = None, packer: Any = None
) -> tuple[dict[str, float], Any]:
    """An update on `groups` (None: `make_groups`): metrics and mismatch of log-probabilities."""
    from megatron_webrl.trainer.loop import train_batch
    from megatron_webrl.trainer.main import make_sequence_packer

    packer = packer or make_sequence_packer(config, platform)
    return train_batch(learner, packer, config, make_groups(config) if groups is None else groups, VERSION)


def scored_operations(config: Config, platform: Any, groups: list[Group] | None = None) -> float:
    """Operations, of this replica, of the pass before the first step of `update`: over the first of two minibatches."""
    from megatron_webrl.trainer.data import batching
    from megatron_webrl.trainer.main import make_sequence_packer

    samples = batching.training_samples(make_groups(config) if groups is None else groups, config, VERSION)
    seed, whole_groups = config.run.seed + VERSION, not config.trainer.without_baseline
    first, _ = batching.minibatches(samples, config.trainer.minibatches, seed, whole_groups)
    return sum(batch.operations for batch in make_sequence_packer(config, platform).build(first, "constant", 10))


def save(learner: Any, config: Config, run_folder: Path, **state: Any) -> Path:
    from megatron_webrl.trainer.accounting import Accounting
    from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState

    checkpoints = Checkpointer(run_folder / "checkpoints", Path(config.model.path), config.trainer.checkpoint)
    values = {"restart_epoch": 0, "closed_tickets": 0, "open_tickets": (), "dropped_tickets": 0}
    checkpoints.start_save(learner, TrainerState(VERSION, **values | {"accounting": Accounting().state_dict()} | state))
    checkpoints.close()
    return latest_checkpoint(run_folder)


def weights_of(learner: Any) -> dict[str, torch.Tensor]:
    """Weights of the policy by Hugging Face name, and of a value head."""
    from megatron_webrl.trainer.parallel import broadcast_from_last_stage
    from tests.model.hf_export import hf_tensors

    weights = {name: tensor.clone() for name, tensor in hf_tensors(learner.models)}
    head = getattr(learner.models[-1], "value_head", None)
    head = broadcast_from_last_stage(None if head is None else head.weight.detach().clone())
    return weights if head is None else weights | {"value_head": head}


def largest_difference(ones: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """Between the tensors of one name; 0 without any: only the first rank has those of the policy."""
    assert ones.keys() == others.keys()
    return max((float((tensor - others[name]).abs().max()) for name, tensor in ones.items()), default=0.0)


def make_groups(config: Config, count: int = 4, words: tuple[int, ...] = (4,)) -> list[Group]:
    """Groups of two with one image a step, the engine's numbers taken from the model itself.

    `words`: numbers of words of a response, in turn by ticket.
    """
    return list(_groups(config.model.path, count, words))


@cache
def _groups(model: str, count: int, words: tuple[int, ...]) -> tuple[Group, ...]:
    from megatron_webrl.model.processor import Processor

    processor = Processor.load(model)
    return tuple(
        Group(ticket, tuple(_trajectory(processor, ticket, index, words[ticket % len(words)]) for index in range(2)))
        for ticket in range(count)
    )


def _trajectory(processor: Any, ticket: int, index: int, words: int) -> Trajectory:
    rng = np.random.default_rng((ticket, index))
    steps = 1 + (ticket + index) % 2
    images = tuple(screenshot(100 * ticket + 10 * index + i, 96, 128) for i in range(steps))
    success = index == ticket % 2
    return Trajectory(
        ticket=ticket, index=index, group_size=2, restart_epoch=0,
        task=Task(f"t{ticket}", "miniwob", "click-test", ticket, 5), instruction="Click.",
        steps=tuple(_step(processor, rng, images, i, words) for i in range(steps)), images=images,
        reward=float(success), outcome="success" if success else "failure", temperature=1.0, seconds=1.0,
        finished_at=float(ticket),
    )  # fmt: skip


def _step(processor: Any, rng: np.random.Generator, images: tuple[bytes, ...], i: int, words: int) -> Step:
    content = [{"type": "text", "text": f"Step {i}."}, *[{"type": "image"} for _ in range(i + 1)]]
    grids = processor.grids(images[: i + 1])
    response = processor.encode_response(" ".join(rng.choice(["click", "type", "wait", "answer"], words)))
    if i == 1:  # the policy may produce the token that stands for images in prompts
        response = np.insert(response, 1, processor.image_token_id).astype(np.int32)
    prompt = processor.expand_image_tokens(processor.encode_chat([{"role": "user", "content": content}]), grids)
    return Step(
        prompt_token_ids=prompt, response_token_ids=response, logprobs=np.full(len(response), -6.0, np.float32),
        versions=np.full(len(response), VERSION, np.int32), images=np.arange(i + 1, dtype=np.int32),
        image_grids=grids, finish_reason="stop", action=Action("wait"),
    )  # fmt: skip
