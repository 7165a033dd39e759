"""Trainer and engines on the same GPUs: placement, the path of the weights, the split of the memory, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.roles import process_specs
from megatron_webrl.placement.memory_estimate import GIB, check_memory, estimate_memory
from megatron_webrl.placement.placement import RoleName, check_cluster, gpu_memory_share, place_processes
from megatron_webrl.placement.placement_table import find_model_config
from tests.config.conftest import refusal

CONFIGS = Path(__file__).parents[2] / "configs"
ONE_GPU = CONFIGS / "2b_1gpu.yaml"
ROLES: tuple[RoleName, ...] = ("trainer", "rollout")
EIGHT = ("cluster.gpus_per_node=8", "trainer.data_parallel=0", "rollout.engines=0", "rollout.tensor_parallel=2",
         "cluster.nodes=2")  # fmt: skip


def made(*overrides: str) -> Config:
    return parse_config(ONE_GPU, list(overrides))


def devices(config: Config) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each process of a job on this machine."""
    specs = process_specs(config, place_processes(config), 0, ROLES, "", {})
    return {spec.name: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs}


def check(*overrides: str) -> None:
    """The placement, then the memory check. Raises ConfigError."""
    check_cluster(config := made(*overrides))
    check_memory(config, estimate_memory(config, find_model_config(config) or {}))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_1gpu.yaml")), ids=lambda path: path.stem)
def test_both_roles_of_a_job_on_one_gpu_see_the_gpu_that_the_job_was_allocated(path: Path):
    config = parse_config(path)
    assert devices(config) == {"trainer-0": "0", "rollout-0": "0"}
    found = place_processes(config)
    assert len({process.port for process in found.processes}) == 2
    assert (found.rings[0].workers, found.rings[0].ranks) == ((0,), (0,))
    for role in ROLES:  # of Slurm
        (spec,) = process_specs(config, found, 0, [role], "host:1", {"CUDA_VISIBLE_DEVICES": "GPU-5c7a"}, "")
        assert spec.environment["CUDA_VISIBLE_DEVICES"] == "GPU-5c7a"
    check_cluster(parse_config(path, ["model.platform=cpu"]))  # instead they may share the CPU


def test_each_shared_gpu_has_one_process_of_each_role_and_cores_of_its_numa_node():
    found = place_processes(made(*EIGHT, 'cluster.numa_cores=["0-31","32-63"]'))
    for node in range(2):
        here = found.on_node(node)
        for role in ROLES:
            assert [gpu for process in here if process.role == role for gpu in process.devices] == list(range(8))
        for process in here:
            assert {core // 32 for core in process.cores} == {process.devices[0] // 4}
        assert sorted(core for process in here for core in process.cores) == list(range(64))
    assert Counter(process.role for process in found.processes) == {"trainer": 16, "rollout": 8}


def test_weights_travel_by_nccl_only_between_gpus_of_their_own():
    apart = "cluster.colocate=false"
    for overrides, through_host in (
        ((), True), (("weights.transport=host", apart), True), ((apart,), False),
        ((apart, "weights.transport=nccl"), False), ((apart, "cluster.gpus_per_node=0"), True),
    ):  # fmt: skip
        assert made(*overrides).weights_through_host == through_host


def test_what_cannot_share_a_gpu_is_refused_and_the_utilization_that_a_refusal_suggests_accepted():
    for overrides, words in (
        (("weights.transport=nccl",), "NCCL refuses two ranks on one GPU; set weights.transport=auto"),
        (("cluster.gpus_per_node=0",), "cluster.colocate=true has no effect with cluster.gpus_per_node=0"),
        (("cluster.engine_gpus_per_node=1",), "cluster.engine_gpus_per_node=1 has no effect with cluster.colocate"),
        (("rollout.kv_cache_mib=0",), "rollout.kv_cache_mib=0 with cluster.colocate=true"),
        (("rollout.engines=2",), "rollout.engines=2 makes 2 ranks, but 1 nodes have 1 GPUs each for them"),
        (("trainer.tensor_parallel=2",), "makes 2 ranks, but 1 nodes have 1 GPUs each"),
        (("cluster.gpu_gib=60",), "more than cluster.gpu_gib=60; set trainer.optimizer.keep=host, take more nodes"),
        (("rollout.gpu_memory_utilization=0.9",), "leaves the trainer 8.0 of cluster.gpu_gib=80, but it needs 58.8"),
        (("rollout.gpu_memory_utilization=0.1",), "leaves the engine 8.0 of cluster.gpu_gib=80, but it needs 16.0 GiB"),
        (("rollout.kv_cache_mib=512",), "rollout.kv_cache_mib=512 holds 4681 tokens, less than rollout.max_model_len"),
        (("model.platform=cpu", "cluster.colocate=false", "cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1"),
         "cluster.gpus_per_node=2 with model.platform=cpu"),
    ):  # fmt: skip
        assert words in refusal(check, *overrides)
    with pytest.raises(ConfigError, match=r"weights.transport=nccl needs GPUs, but cluster.gpus_per_node=0"):
        check_cluster(parse_config(None, ["weights.transport=nccl"]))
    suggested = refusal(check, "rollout.gpu_memory_utilization=0.9").rpartition("about ")[2]
    check(f"rollout.gpu_memory_utilization={suggested}")


def test_an_evaluation_has_the_shared_gpus_for_its_engines_alone():
    config = made("evaluation.only=true", "rollout.engines=0", "rollout.kv_cache_mib=0")
    assert devices(config) == {"rollout-0": "0"}
    assert gpu_memory_share(config, "engine") == 1.0


def test_staging_buffers_in_host_memory_take_none_of_the_gpu():
    sizes = {}
    for transport in ("host", "nccl"):
        config = made(f"weights.transport={transport}", "cluster.colocate=false")
        found = estimate_memory(config, find_model_config(config) or {})
        sizes[transport] = (found.trainer[0].buffers, found.engine.buffers)
    assert sizes["nccl"] == tuple(size + GIB // 2 for size in sizes["host"])
