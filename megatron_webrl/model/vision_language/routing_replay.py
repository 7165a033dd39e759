"""The setting trainer.routing_replay: whether engines record routed experts, and the trainer replays them."""

from __future__ import annotations

import os
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.hf_config import has_experts, read_model_config

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Environment variable of vLLM: "1" selects its model runner V2, "0" V1; without it V2, where Triton is."""


def replays_routing(config: Config) -> bool:
    """Whether the trainer sends tokens to the experts that the engine chose."""
    setting = config.trainer.routing_replay
    if setting != "auto":
        return setting == "on"
    return has_experts(read_model_config(config.model.path)) and not replay_obstacle(config)


def replay_obstacle(config: Config) -> str:
    """Why a mixture of experts trains without replay although trainer.routing_replay=auto; empty: it does not."""
    if config.trainer.routing_replay != "auto" or not has_experts(read_model_config(config.model.path)):
        return ""
    from megatron_webrl.model.platform import selects_cuda

    return _recording_obstacle(config, cpu=not selects_cuda(config.model.platform))


def records_experts(config: Config) -> bool:
    """Whether engines record the experts of their tokens: for a trainer that replays them."""
    return not config.evaluation.only and replays_routing(config)


def check_routing_replay(config: Config, description: dict[str, Any]) -> None:
    """Refuse trainer.routing_replay=on where nothing is recorded. `description`: config.json. Raises ConfigError."""
    if config.trainer.routing_replay != "on" or config.evaluation.only:
        return
    if not has_experts(description):
        raise ConfigError(
            f"trainer.routing_replay=on needs a mixture of experts; {config.model.path} is dense; set it to auto"
        )
    # A job that is checked on a login node may have model.platform=auto and compute on GPUs.
    if obstacle := _recording_obstacle(config, cpu=config.model.platform == "cpu"):
        raise ConfigError(f"trainer.routing_replay=on: {obstacle}; change it, or set trainer.routing_replay to auto")


def _recording_obstacle(config: Config, cpu: bool) -> str:
    """Why engines cannot record their experts; empty: they can. `cpu`: they compute on the CPU."""
    rollout = config.rollout
    if rollout.pipeline_parallel > 1:
        return f"with rollout.pipeline_parallel={rollout.pipeline_parallel} no rank of an engine has all layers"
    if rollout.engine_options.get("speculative_config"):
        return "rollout.engine_options.speculative_config computes tokens that are rejected"
    if rollout.engine_options.get("enable_prefix_caching") is False:
        return "rollout.engine_options.enable_prefix_caching=false: vLLM keeps the experts with its prefix cache"
    if os.environ.get(MODEL_RUNNER, "0" if cpu else "1") != "1":
        return f"vLLM's model runner V1 records none; {MODEL_RUNNER}=1 in the environment selects V2, by Triton"
    return ""
