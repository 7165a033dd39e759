"""Trainer ranks and engines on the same GPUs (cluster.colocate): which settings it needs and how memory is split."""

from __future__ import annotations

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError


def check_gpu_sharing(config: Config) -> None:
    """Raise ConfigError for settings that need another placement of the two roles on GPUs."""
    cluster, rollout, transport = config.cluster, config.rollout, config.weights.transport
    if config.evaluation.only:
        return
    if transport == "nccl" and not cluster.gpus_per_node:
        raise ConfigError(
            "weights.transport=nccl needs GPUs, but cluster.gpus_per_node=0; set cluster.*, or weights.transport=auto"
        )
    if not cluster.colocate:
        return
    if not cluster.gpus_per_node:
        raise ConfigError(
            "cluster.colocate=true has no effect with cluster.gpus_per_node=0; set cluster.gpus_per_node too (and "
            "model.platform=cpu to compute without GPUs)"
        )
    if transport == "nccl":
        raise ConfigError(
            "weights.transport=nccl with cluster.colocate=true: NCCL refuses two ranks on one GPU; set "
            "weights.transport=auto"
        )
    if cluster.engine_gpus_per_node:
        raise ConfigError(
            f"cluster.engine_gpus_per_node={cluster.engine_gpus_per_node} has no effect with cluster.colocate=true, "
            "which gives engines every GPU; leave it out"
        )
    if not rollout.kv_cache_mib:
        raise ConfigError(
            "rollout.kv_cache_mib=0 with cluster.colocate=true: vLLM cannot measure the free memory of a GPU on "
            "which the trainer allocates; set its size"
        )


def gpu_memory_share(config: Config, role: str) -> float:
    """Fraction of a GPU's memory for an engine's rank (role "engine") or a rank of the trainer (any other role)."""
    if not config.cluster.colocate or config.evaluation.only:
        return 1.0
    engine = config.rollout.gpu_memory_utilization
    return engine if role == "engine" else 1.0 - engine
