"""Megatron's data parallelism, distributed optimiser and schedule for the chunks of a model."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_webrl.config.trainer import OptimizerConfig
from megatron_webrl.model import gradients
from megatron_webrl.model.value_head import VALUE_HEAD
from megatron_webrl.model.vision_language.model import VisionLanguageModel

# How checkpoints hold the state, by trainer.checkpoint.optimizer_shards. Whole tensors are gathered in host memory on
# one rank of each data-parallel group: on all, a node would hold them once per GPU.
SHARDING_METADATA: dict[str, dict[str, Any]] = {
    "whole": {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
    },
    "ranks": {"distrib_optim_sharding_type": "dp_reshardable"},
}
MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM_EPSILON = 1e-8
ADAM_BETAS = (0.9, 0.999)  # decay of Adam's moments
MIN_LEARNING_RATE_RATIO = 0.1  # final learning rate of the schedule, as a fraction of the peak
SCHEDULE_LABELS = {
    "max_lr": "learning_rate", "min_lr": "final learning rate", "lr_decay_style": "schedule",
    "lr_warmup_steps": "steps of warm-up", "lr_decay_steps": "steps until the final learning rate",
    "start_wd": "weight_decay",
}  # fmt: skip
"""What of Megatron's schedule follows from the configuration, and how a message calls it."""


class NonFiniteGradient(RuntimeError):
    """The gradient is not finite. No weight has changed."""


@dataclass
class ScheduledOptimizer:
    """An optimiser and its learning rate schedule."""

    optimizer: Any
    scheduler: OptimizerParamScheduler
    clip_norm: float  # gradients of a larger norm are scaled down to it
    keep: str = "device"  # trainer.optimizer.keep
    _copies: list[torch.Tensor] = field(default_factory=list)  # in the host's memory, of the tensors that are there
    _away: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.keep == "host":
            self._leave()

    @contextlib.contextmanager
    def resident(self) -> Iterator[None]:
        """Main weights and moments are on the device; with keep=host their memory there is free again afterwards.

        Copies are ordered with what the device computes: nothing waits for them.
        """
        self._come()
        try:
            yield
        finally:
            if self.keep == "host":
                self._leave()

    @torch.no_grad()
    def _come(self) -> None:
        for tensor, copy in zip(self._away, self._copies if self._away else (), strict=True):
            tensor.untyped_storage().resize_(copy.untyped_storage().nbytes())
            tensor.copy_(copy, non_blocking=True)
        self._away = []

    @torch.no_grad()
    def _leave(self) -> None:
        tensors = list(self._own_tensors())
        if [(each.shape, each.dtype) for each in tensors] != [(each.shape, each.dtype) for each in self._copies]:
            pinned = any(each.is_cuda for each in tensors)
            self._copies = [torch.empty_like(each, device="cpu", pin_memory=pinned) for each in tensors]
        for tensor, copy in zip(tensors, self._copies, strict=True):
            copy.copy_(tensor, non_blocking=True)
            tensor.untyped_storage().resize_(0)
        self._away = tensors

    def _own_tensors(self) -> Iterator[torch.Tensor]:
        """Main weights that are no views of the model's, and moments."""
        for part in self.parts:
            models = {buffer.param_data.untyped_storage().data_ptr() for buffer in part.buffers}
            for parameter in (each for group in part.optimizer.param_groups for each in group["params"]):
                if parameter.untyped_storage().data_ptr() not in models:
                    yield parameter
                state = part.optimizer.state.get(parameter, {})
                yield from (state[name] for name in MOMENTS if name in state)

    def step(self, value_head_only: bool = False) -> float:
        """Step the optimiser and the schedule; returns the global gradient norm before clipping.

        `value_head_only`: all other weights keep their values. Raises NonFiniteGradient before any weight changes.
        Collective.
        """
        with self.resident():
            return self._step(value_head_only)

    def _step(self, value_head_only: bool) -> float:
        # Megatron checks for infinities under fp16 only; without this check a NaN would reach every weight.
        overflow = self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if overflow or not math.isfinite(norm):
            raise NonFiniteGradient(f"the gradient norm is {norm}; the optimiser did not step")
        if value_head_only:
            for group in self.optimizer.param_groups:
                group["lr"] *= group.get(VALUE_HEAD, 0.0)
        self.optimizer.step()
        self.scheduler.step(1)  # sets the learning rate of all groups
        return norm

    def restart_adam(self) -> None:
        """Set moments and step count to 0; weights, learning rate and schedule stay.

        After steps without gradients, which Adam counted, it would correct the moments' bias too little: its steps
        would be several times as long as the first ones of an Adam.
        """
        with self.resident():
            for part in self.parts:
                for state in part.optimizer.state.values():
                    for tensor in state.values():
                        tensor.zero_()
                for group in part.optimizer.param_groups:
                    if "step" in group:
                        group["step"] = 0

    @property
    def step_count(self) -> int:
        """Number of Adam steps."""
        counts = [values["step"] for part in self._torch_parts() for values in part.optimizer.state.values()]
        counts += [group.get("step", 0) for part in self.parts for group in part.optimizer.param_groups]
        return int(counts[0]) if counts else 0

    def sharded_state(self, models: dict[str, Any], shards: str, *, is_loading: bool) -> dict[str, Any]:
        """Main weights and moments in Megatron's sharded form. Collective when saving.

        `models`: sharded state of the chunks, made just before; `shards`: a key of SHARDING_METADATA. Megatron's own
        state has the parameter groups too, whose form depends on the layout; their settings follow from the
        configuration, the schedule and the step count. To be called within `resident`, and the state used there.
        """
        self._allocate_state()
        states = {}
        for number, part in enumerate(self.parts):
            state = part.sharded_state_dict(models, is_loading, metadata=SHARDING_METADATA[shards])["param_state"]
            if state is not None:  # None: another rank has gathered it
                if shards == "ranks":  # both optimizers number their buffers from 0
                    add_prefix_for_sharding(state, f"optimizer.part{number}.")
                states[f"part{number}"] = state
        return states

    def load_sharded_state(self, states: dict[str, Any], shards: str, step_count: int) -> None:
        """Restore the state that `sharded_state` described, and the step count.

        With torch's Adam, Megatron 0.16 expects the step among the moments, where its checkpoints have none, and then
        gives all parameters one shared step tensor, which each parameter would increment.
        """
        sharding_type = SHARDING_METADATA[shards]["distrib_optim_sharding_type"]
        for number, part in enumerate(self.parts):
            settings = part.state_dict()
            for group in settings["optimizer"]["param_groups"]:
                group["step"] = step_count
            state = {"param_state": states[f"part{number}"], "param_state_sharding_type": sharding_type}
            by_torch = part in self._torch_parts()
            if by_torch:
                part._set_main_param_and_optimizer_states = partial(_restore_with_step, part)
            with torch.no_grad():  # Megatron's own guard covers whole tensors only
                part.load_state_dict(settings | state)
            if by_torch:
                del part._set_main_param_and_optimizer_states
                for values in part.optimizer.state.values():
                    values["step"] = torch.tensor(float(step_count))

    def resume_schedule(self, stored: Mapping[str, Any]) -> list[str]:
        """Continue the configured schedule at the step of a checkpoint's, `stored` by Megatron's names; returns what
        differs between the two, a line each.
        """
        configured = self.scheduler.state_dict()
        self.scheduler.num_steps = 0
        self.scheduler.step(int(stored["num_steps"]))
        return [
            f"{label} {_shown(stored[name])}, now {_shown(configured[name])}"
            for name, label in SCHEDULE_LABELS.items()
            if stored[name] != configured[name]
        ]

    def _allocate_state(self) -> None:
        """Allocate the moments before the first step, when Adam would: Megatron's checkpoints expect them.

        Megatron's own way is a step with zero gradients, which decays the weights and counts.
        """
        for part in self.parts:
            counts_by_parameter = part in self._torch_parts()
            for parameter in (p for group in part.optimizer.param_groups for p in group["params"]):
                if not part.optimizer.state[parameter]:
                    state = {name: torch.zeros_like(parameter) for name in MOMENTS}
                    if counts_by_parameter:
                        state["step"] = torch.zeros((), dtype=torch.float32)
                    part.optimizer.state[parameter] = state

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimisers of dense and of expert parameters that have parameters on this rank."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part for part in parts if part.optimizer is not None]

    def _torch_parts(self) -> list[Any]:
        return [part for part in self.parts if isinstance(part.optimizer, torch.optim.AdamW)]

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _restore_with_step(part: Any, model_parameter: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    group, order = part.model_param_group_index_map[model_parameter]
    main_parameter = part.optimizer.param_groups[group]["params"][order]
    step = part.optimizer.state[main_parameter]["step"]
    type(part)._set_main_param_and_optimizer_states(part, model_parameter, {**tensors, "step": step})


@contextlib.contextmanager
def _adam(implementation: str) -> Iterator[None]:
    """Make Megatron build torch's Adam, or the fused one that it found when it was imported. Raises RuntimeError."""
    if implementation == "fused":
        if megatron_optimizer.USING_PYTORCH_OPTIMIZER:
            raise RuntimeError(
                "trainer.optimizer.implementation=fused: neither Transformer Engine's Adam nor apex's imports here"
            )
        yield
        return
    before = (megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam)
    try:
        megatron_optimizer.Adam = distrib_optimizer.Adam = torch.optim.AdamW
        megatron_optimizer.USING_PYTORCH_OPTIMIZER = True
        yield
    finally:
        megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER, distrib_optimizer.Adam = before


def make_optimizer(
    chunks: list[DistributedDataParallel],
    config: OptimizerConfig,
    steps: int,
    dtype: torch.dtype,
    epsilon: float = ADAM_EPSILON,
) -> ScheduledOptimizer:
    """Adam with the configured schedule over `steps` optimiser steps.

    Biases and norms get no weight decay.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.learning_rate,
        min_lr=config.learning_rate * MIN_LEARNING_RATE_RATIO,
        weight_decay=config.weight_decay,
        adam_beta1=ADAM_BETAS[0],
        adam_beta2=ADAM_BETAS[1],
        adam_eps=epsilon,
        clip_grad=config.clip_norm,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    own_group: dict[ParamKey, Any] = {ParamKey(name=f"*{VALUE_HEAD}.weight"): {VALUE_HEAD: 1.0}}  # see step()
    with _adam(config.implementation):
        optimizer = get_megatron_optimizer(settings, chunks, get_standard_config_overrides(settings) | own_group)
    if dtype is torch.bfloat16:
        for chunk in chunks:
            chunk.config.grad_scale_func = partial(optimizer.scale_loss)
    warmup = min(steps, round(config.warmup_fraction * steps))
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0 if warmup else config.learning_rate,
        max_lr=config.learning_rate,
        min_lr=config.learning_rate * MIN_LEARNING_RATE_RATIO,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps + 1,
        lr_decay_style=config.schedule,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=steps + 1,
        wd_incr_style="constant",
    )
    scheduler.step(1)  # start at step 1 of the warm-up: at step 0 the learning rate would be zero
    return ScheduledOptimizer(optimizer, scheduler, config.clip_norm, config.keep)


def wrap_ddp(chunks: Sequence[VisionLanguageModel]) -> list[DistributedDataParallel]:
    """Give the chunks contiguous float32 gradient buffers, to which products add, averaged over data-parallel ranks.

    The reduction runs after the last backward pass: a micro-batch without images gives the vision tower no gradient, so
    no rank knows earlier that its own are complete. The distributed optimiser needs shards even with one replica.
    """
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True, check_for_nan_in_grad=False
    )
    wrapped = []
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = gradients.finalize_gradients
        gradients.accumulate_in_products(chunk)
        wrapped.append(DistributedDataParallel(config=chunk.config, ddp_config=settings, module=chunk))
        wrapped[-1].broadcast_params()
    return wrapped
