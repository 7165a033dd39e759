"""Megatron's DistributedDataParallel, distributed optimiser and schedule around a model.

Transformer Engine's or apex's fused Adam is taken by Megatron itself where one is installed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_webrl.config import OptimizerConfig


class BadGradient(RuntimeError):
    """The gradient is not finite; no weight was changed."""


@dataclass
class Optimization:
    """An optimiser and the schedule of its learning rate."""

    optimizer: Any
    scheduler: OptimizerParamScheduler

    def step(self) -> float:
        """One step of optimiser and schedule; returns the global gradient norm before clipping.

        Raises BadGradient before any weight changes. Collective.
        """
        # Megatron looks for infinities under fp16 only; a NaN would otherwise be written into every weight.
        overflow = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if overflow or not math.isfinite(norm):
            raise BadGradient(f"the gradient norm is {norm}; the optimiser did not step")
        self.optimizer.step()
        self.scheduler.step(1)
        return norm

    def allocate_state(self) -> None:
        """Give torch's Adam its moments before the first step: Megatron's checkpoints look for them.

        Transformer Engine's and apex's need no help.
        """
        for part in self._torch_parts():
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                if not part.optimizer.state[parameter]:
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    part.optimizer.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what Megatron's fully reshardable checkpoint holds.

        With torch's Adam, Megatron 0.16 stores the step apart from the moments, looks for it among them when it
        restores, and gives all parameters one step tensor, which each of them would then count up.
        """
        for part in self._torch_parts():
            part._set_main_param_and_optimizer_states = partial(_restore_with_step, part)
        self.optimizer.load_state_dict(state)
        for part in self._torch_parts():
            del part._set_main_param_and_optimizer_states
            for values in part.optimizer.state.values():
                values["step"] = values["step"].clone()

    def _torch_parts(self) -> list[Any]:
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part for part in parts if isinstance(part.optimizer, torch.optim.AdamW)]

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])


def _restore_with_step(part: Any, model_parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_parameter]
    main_parameter = part.optimizer.param_groups[group]["params"][order]
    step = part.optimizer.state[main_parameter]["step"]
    type(part)._set_main_param_and_optimizer_states(part, model_parameter, {**tensors, "step": step})


def wrap(model: Any) -> DistributedDataParallel:
    """Megatron's DDP with contiguous gradient buffers; gradients are averaged over data-parallel ranks.

    The distributed optimiser needs the sharded form also with a single replica.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    wrapped = DistributedDataParallel(config=model.config, ddp_config=settings, module=model)
    wrapped.broadcast_params()
    model.config.no_sync_func = wrapped.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def optimization(
    chunks: list[DistributedDataParallel], config: OptimizerConfig, steps: int, dtype: torch.dtype
) -> Optimization:
    """Adam with the configured schedule over `steps` optimiser steps.

    Biases and norms get no weight decay, as Megatron decides by shape.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        min_lr=config.learning_rate * config.min_learning_rate_ratio,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.epsilon,
        clip_grad=config.clip_norm,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, chunks)
    if dtype is torch.bfloat16:
        for chunk in chunks:
            chunk.config.grad_scale_func = partial(optimizer.scale_loss)
    warmup = min(steps, round(config.warmup_fraction * steps))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if warmup else config.learning_rate,
        max_lr=config.learning_rate,
        min_lr=config.learning_rate * config.min_learning_rate_ratio,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps + 1,
        wd_incr_style="constant",
    )
    scheduler.step(1)  # the first step is step 1 of the warm-up: at step 0 the rate would be zero
    return Optimization(optimizer, scheduler)
