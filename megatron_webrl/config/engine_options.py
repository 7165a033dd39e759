"""Checks of rollout.engine_options against the arguments of vLLM's AsyncEngineArgs, without importing vLLM."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

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
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "kv_cache_memory_bytes": "rollout.kv_cache_mib",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "max_num_seqs": "rollout.max_num_seqs",
}
"""The setting that governs an argument of vLLM."""
FIXED = {
    "logprobs_mode": "the loss needs log-probabilities of the sampled distribution",
    "weight_transfer_config": "weights arrive through it",
    "worker_extension_cls": "weights arrive through it",
    "scheduler_cls": "after an update requests are recomputed with their images",
    "distributed_executor_backend": "the number of ranks and nodes decides it",
    "mm_encoder_tp_mode": "every tensor-parallel rank has the whole vision tower",
    "node_rank": "the placement decides it",
    "master_addr": "the placement decides it",
    "master_port": "the placement decides it",
    "disable_log_stats": "engines log none",
    "enable_log_requests": "engines log none",
    "hf_token": "models are read from folders, and the configuration is stored",
}
"""Why the project sets an argument of vLLM itself, or gives it no effect."""
FIXED_IN_TRAINING = {
    "load_format": "engines read no weights",
    "quantization": "the trainer sends unquantised weights",
    "quantization_config": "the trainer sends unquantised weights",
}
"""Arguments of vLLM that only engines without a trainer (evaluation.only) can have."""


def check_engine_options(options: Iterable[str], *, in_training: bool) -> None:
    """Refuse options that settings or the project govern. Raises ConfigError."""
    for name in options:
        key = f"rollout.engine_options.{name}"
        if setting := SETTINGS.get(name) or ("rollout.engines" if name.startswith("data_parallel_") else ""):
            raise ConfigError(f"{key} is governed by {setting}; set that instead")
        fixed = FIXED | FIXED_IN_TRAINING if in_training else FIXED
        if reason := fixed.get(name):
            raise ConfigError(f"{key} cannot be set: {reason}; leave it out")


def check_engine_option_names(options: Iterable[str]) -> None:
    """Refuse options that the vLLM that is installed here does not know; without one do nothing. Raises ConfigError."""
    if options and (known := installed_arguments()) is not None:
        refuse_unknown(options, known)


def refuse_unknown(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for the first of `options` that is not among the arguments `known`."""
    names = sorted(known)
    for name in options:
        if name not in names:
            close = get_close_matches(name, names, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else "; leave it out"
            raise ConfigError(f"rollout.engine_options.{name} is no argument of vLLM's AsyncEngineArgs{hint}")


def installed_arguments() -> set[str] | None:
    """Arguments of AsyncEngineArgs, read in the source of the vLLM that is installed here; None: none is."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    source = Path(found.submodule_search_locations[0], "engine", "arg_utils.py").read_text()
    fields = (
        field.target.id
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
    return {name for name in fields if not name.startswith("_")}
