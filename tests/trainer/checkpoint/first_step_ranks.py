"""Rank bodies of the test of a checkpoint before the first optimizer step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.trainer import OptimizerConfig
from tests.trainer.checkpoint.small_learner import (
    LAYOUTS,
    checkpoints_in,
    laid_out,
    make_learner,
    save,
    scramble,
    session,
    step,
    tensors_of,
)


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


def run(rank: int, folder: str) -> None:
    """Save before the first step, load into another learner, and take two steps with both."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

    found: dict[str, Any] = {}
    with session(rank, folder), laid_out(LAYOUTS[0]):
        for implementation in ("torch", "auto"):
            if implementation == "auto":  # as if Transformer Engine were installed
                optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam = FusedAdam, False, FusedAdam
                distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
            settings = OptimizerConfig(learning_rate=1e-2, clip_norm=1e9, implementation=implementation)
            learner, other = (make_learner(LAYOUTS[0], torch.bfloat16, settings) for _ in range(2))
            scramble(learner)
            before = [parameter.detach().clone() for parameter in learner.chunks[0].parameters()]
            kinds = {type(part.optimizer).__name__ for part in learner.optimizer.parts}
            first = save(checkpoints_in(Path(folder, implementation)), learner, 0)
            unchanged = all(map(torch.equal, before, learner.chunks[0].parameters()))
            load_learner(first, other)
            counts = [learner.optimizer.step_count, other.optimizer.step_count]
            for _ in range(2):
                step(learner)
                step(other)
            paths = [
                save(checkpoints_in(Path(folder, implementation, str(n))), each, 2)
                for n, each in enumerate((learner, other))
            ]
            one, two = map(tensors_of, paths)
            found[implementation] = {
                "kinds": kinds,
                "unchanged": unchanged,
                "moments": [bool(t.any()) for name, t in tensors_of(first).items() if ".exp_avg" in name],
                "counts": [*counts, learner.optimizer.step_count, other.optimizer.step_count],
                "equal": [torch.equal(tensor, two[name]) for name, tensor in one.items()],
                "trained": not torch.equal(before[0], next(learner.chunks[0].parameters())),
            }
    torch.save(found, f"{folder}/first-step-{rank}.pt")
