"""Checks of rollout.engine_options, arguments of vLLM's AsyncEngineArgs, without importing vLLM."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from megatron_webrl.config.setting import ConfigError

SETTINGS = {
    "model": "model.path",
    "dtype": "rollout.dtype",
    "seed": "run.seed",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "pipeline_parallel_size": "rollout.pipeline_parallel",
    "enable_expert_parallel": "rollout.expert_parallel",
    "nnodes": "cluster.nodes",
    "max_model_len": "rollout.max_model_len",
    "limit_mm_per_prompt": "rollout.context.history_turns",
    "kv_cache_memory_bytes": "rollout.kv_cache_mib",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_num_seqs": "rollout.max_num_seqs",
    "enable_return_routed_experts": "trainer.routing_replay",
}
"""The setting that governs an argument of vLLM."""
FIXED = frozenset({
    "hf_overrides", "logprobs_mode", "weight_transfer_config", "worker_extension_cls", "scheduler_cls",
    "mm_encoder_tp_mode", "distributed_executor_backend", "node_rank", "master_addr", "master_port",
    "disable_log_stats", "enable_log_requests", "hf_token"
})  # fmt: skip
"""Arguments of vLLM that the project sets itself, or gives no effect."""
FIXED_IN_TRAINING = frozenset({"load_format", "quantization", "quantization_config"})
"""Arguments of vLLM that only engines without a trainer (evaluation.only) can have: the trainer sends all weights."""


def check_engine_options(options: Iterable[str], *, in_training: bool) -> None:
    """Refuse options that settings or the project govern. Raises ConfigError."""
    for name in options:
        key = f"rollout.engine_options.{name}"
        if setting := SETTINGS.get(name) or ("rollout.engines" if name.startswith("data_parallel_") else ""):
            raise ConfigError(f"{key} is governed by {setting}; set that instead")
        if name in FIXED or (in_training and name in FIXED_IN_TRAINING):
            raise ConfigError(f"{key} cannot be set: this project or its trainer relies on its own value; leave it out")


def refuse_unknown(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first of `options` that is not among the arguments `known`."""
    names = sorted(known)
    for name in options:
        if name not in names:
            close = get_close_matches(name, names, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else "; leave it out"
            raise ConfigError(f"rollout.engine_options.{name} is no argument of vLLM's AsyncEngineArgs{hint}")
