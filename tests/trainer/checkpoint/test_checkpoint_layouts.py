"""Checkpoints on two gloo processes load in every parallel layout, bit for bit in their own."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from megatron_webrl.config.trainer import OptimizerConfig, TrainerConfig
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError, check_resumable
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
from tests.trainer.checkpoint.small_learner import (
    LAYOUTS,
    checkpoints_in,
    make_learner,
    save,
    scramble,
    state_of,
    step,
    tensors_of,
)
from tests.trainer.ranks import process_groups, results

# A layout, one whose checkpoint it continues, and how that holds the optimizer's state.
SOME = [("virtual", "virtual", "whole"), ("virtual", "virtual", "ranks"), ("tensor", "expert", "whole")]
ALL = [
    *((name, other, "whole") for name, other in product(LAYOUTS, LAYOUTS)),
    *((name, name, "ranks") for name in ("tensor", "virtual", "expert")),
]


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory: writing many checkpoints to a slow disk would take long."""
    with tempfile.TemporaryDirectory(prefix="webrl-test-", dir="/dev/shm") as folder:
        yield Path(folder)


def across_layouts(_: Any, folder: Path, resumes: list[tuple[str, str, str]]) -> dict[Any, Any]:
    """Each layout saves at step 2 and continues to step 5; then layouts resume from such checkpoints, with the
    optimizer's state in the host's memory.
    """
    found: dict[Any, Any] = {}
    for name in sorted({other for _, other, _ in resumes}):
        sizes = LAYOUTS[name]
        with process_groups(sizes):
            learner = make_learner(sizes)
            scramble(learner)
            for _step in range(2):
                step(learner)
            if (name, name, "ranks") in resumes:
                save(checkpoints_in(folder / f"{name}-ranks", optimizer_shards="ranks"), learner, 2)
            checkpoints = checkpoints_in(folder / f"{name}-whole")
            draws()
            checkpoints.start_save(learner, state_of(2))
            found[name, "draws"], found[name, "rate"] = draws(), learner.optimizer.learning_rate
            for _step in range(3):  # while the checkpoint is written
                step(learner)
            found[name, "optimizers"] = len(learner.optimizer.optimizer.chained_optimizers)
            found[name, "chunks"] = len(learner.chunks)
            found[name] = tensors_of(save(checkpoints, learner, 5))
    for resume in resumes:
        name, other, shards = resume
        with process_groups(LAYOUTS[name]):
            learner = make_learner(LAYOUTS[name], keep="host")
            saved = folder / f"{other}-{shards}" / "checkpoints" / "version-000002"
            load_learner(saved, learner)
            found[resume, "draws"], found[resume, "rate"] = draws(), learner.optimizer.learning_rate
            found[resume, "saved"] = [*tensors_of(saved)] if shards == "ranks" else []
            for _step in range(3):
                step(learner)
            found[resume] = tensors_of(save(checkpoints_in(folder / f"{name}-from-{other}-{shards}"), learner, 5))
    checkpoint = folder / "virtual-ranks" / "checkpoints" / "version-000002"
    trainer = TrainerConfig(pipeline_parallel=2, virtual_pipeline=2)
    check_resumable(checkpoint, trainer)
    trainer.tensor_parallel = 2
    with pytest.raises(CheckpointError, match=r"optimizer_shards=ranks and tensor size 1, not 2"):
        check_resumable(checkpoint, trainer)
    return found


def draws() -> list[float]:
    with get_cuda_rng_tracker().fork():
        named = torch.rand(()).item()
    return [random.random(), float(np.random.rand()), torch.rand(()).item(), named]


@pytest.mark.parametrize("resumes", [SOME, pytest.param(ALL, marks=pytest.mark.slow)], ids=["some", "all"])
def test_training_resumes_in_every_layout_and_bit_for_bit_in_its_own(
    memory: Path, resumes: list[tuple[str, str, str]]
) -> None:
    found, second = results(across_layouts, memory / str(len(resumes)), resumes)
    assert (found["expert", "optimizers"], found["virtual", "chunks"]) == (2, 2)
    assert any("experts" in key and tensor.float().std() > 0 for key, tensor in found["virtual"].items())
    for resume in resumes:
        name, other, shards = resume
        there, here = found[other], found[resume]
        assert there.keys() == here.keys(), resume
        assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in there) * 4 == len(there)
        for key, tensor in there.items():
            same = torch.equal if name == other else torch.allclose
            limits = {} if name == other else {"rtol": 1e-5, "atol": 1e-7}
            assert same(tensor, here[key], **limits), (resume, key)
        assert found[resume, "rate"] == found[other, "rate"]
        if name == other and shards == "whole":
            for rank in (found, second):
                assert rank[resume, "draws"] == rank[name, "draws"], resume
        if shards == "ranks":
            assert any(key.startswith("optimizer.part0.optimizer.distributed.") for key in found[resume, "saved"])
            assert not any(key.startswith("optimizer.state.") for key in found[resume, "saved"])


class FusedAdam(torch.optim.Optimizer):
    """AdamW with state like Transformer Engine's: moments from the first step on, one count for a group."""

    def __init__(self, params: Any, adam_w_mode: bool, **settings: Any) -> None:
        assert adam_w_mode, "weight decay is decoupled from the gradient"
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            one, two = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if len(state) == 0:
                    state |= {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(parameter.grad, 1 - one)
                state["exp_avg_sq"].lerp_(parameter.grad.square(), 1 - two)
                mean, square = (
                    state[name] / (1 - beta ** group["step"]) for name, beta in (("exp_avg", one), ("exp_avg_sq", two))
                )
                parameter.sub_(group["lr"] * mean / (square.sqrt() + group["eps"]))


def first_step(_: Any, folder: Path) -> dict[str, Any]:
    """With each Adam: save before the first step, load into another learner, and take two steps with both."""
    found: dict[str, Any] = {}
    # As if Transformer Engine were installed, whose Adam `fused` takes.
    mock.patch.multiple(megatron_optimizer, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False).start()
    te = {"Adam": FusedAdam, "HAVE_APEX_OR_TE": True, "USING_TE_OPTIMIZER": True}
    mock.patch.multiple(distrib_optimizer, **te).start()
    with process_groups(LAYOUTS["replicas"]):
        for implementation in ("torch", "fused"):
            settings = OptimizerConfig(learning_rate=1e-2, clip_norm=1e9, implementation=implementation)
            kept = (settings, replace(settings, keep="host"))
            learner, other = (make_learner(LAYOUTS["replicas"], torch.bfloat16, each) for each in kept)
            scramble(learner)
            before = [parameter.detach().clone() for parameter in learner.chunks[0].parameters()]
            kinds = {type(part.optimizer).__name__ for part in learner.optimizer.parts}
            first = save(checkpoints_in(folder / implementation), learner, 0)
            unchanged = all(map(torch.equal, before, learner.chunks[0].parameters()))
            load_learner(first, other)
            counts = [learner.optimizer.step_count, other.optimizer.step_count]
            for _ in range(2):
                step(learner)
                step(other)
            one, two = ([*each.chunks[0].parameters(), *_moments(each)] for each in (learner, other))
            found[implementation] = {
                "kinds": kinds, "unchanged": unchanged,
                "moments": [bool(t.any()) for name, t in tensors_of(first).items() if ".exp_avg" in name],
                "counts": [*counts, learner.optimizer.step_count, other.optimizer.step_count],
                "equal": [torch.equal(*both) for both in zip(one, two, strict=True)],
                "trained": not torch.equal(before[0], next(learner.chunks[0].parameters())),
            }  # fmt: skip
    return found


def _moments(learner: Any) -> list[torch.Tensor]:
    states = [values for part in learner.optimizer.parts for values in part.optimizer.state.values()]
    with learner.optimizer.resident():
        return [values[name].clone() for values in states for name in ("exp_avg", "exp_avg_sq")]


def test_a_checkpoint_before_the_first_step_loads_and_training_continues_alike(tmp_path: Path) -> None:
    kinds = {"torch": {"AdamW"}, "fused": {"FusedAdam"}}
    for rank in results(first_step, tmp_path):
        for implementation, found in rank.items():
            assert found["kinds"] == kinds[implementation]
            assert found["unchanged"]
            assert found["moments"], implementation
            assert not any(found["moments"])
            assert found["counts"] == [0, 0, 2, 2]
            assert found["trained"]
            assert all(found["equal"]), implementation


def twenty_steps(_: Any, folder: Path) -> dict[str, Any]:
    """With the optimizer's state on the device and in the host's memory, in each layout."""
    found: dict[str, Any] = {}
    for name, sizes in LAYOUTS.items():
        with process_groups(sizes):
            learners = [make_learner(sizes, torch.bfloat16, steps=20, keep=keep) for keep in ("device", "host")]
            for _ in range(20):
                for learner in learners:
                    step(learner)
            weights = [[p for model in each.models for p in model.parameters()] for each in learners]
            found[name] = {
                "equal": [torch.equal(*both) for both in zip(*weights, strict=True)],
                "moments": [torch.equal(*both) for both in zip(*map(_moments, learners), strict=True)],
                "bytes": [*map(_state_bytes, learners)],
            }
    return found


def _state_bytes(learner: Any) -> tuple[int, int]:
    """Of main weights in float32 of others in bfloat16, and of moments, on the device."""
    own = [w for part in learner.optimizer.parts for group in part.shard_fp32_from_float16_groups for w in group]
    moments = [
        t for part in learner.optimizer.parts for v in part.optimizer.state.values() for t in v.values() if t.dim()
    ]
    return tuple(sum(tensor.untyped_storage().nbytes() for tensor in each) for each in (own, moments))  # type: ignore[return-value]


def test_state_in_the_hosts_memory_gives_the_same_weights_and_leaves_none_on_the_device(tmp_path: Path) -> None:
    for rank in results(twenty_steps, tmp_path):
        for name, found in rank.items():
            assert all(found["equal"] + found["moments"]), name
            device, host = found["bytes"]
            assert device[1] >= 2 * device[0] > 0, name  # some weights are in float32 and have no other
            assert host == (0, 0), name
