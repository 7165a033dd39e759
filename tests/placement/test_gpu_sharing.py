"""Trainer and engines on the same GPUs: placement, the path of the weights, the split of the memory, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.roles import process_specs
from megatron_webrl.placement.memory_estimate import GIB, check_memory, estimate_memory
from megatron_webrl.placement.placement import RoleName, check_cluster, gpu_memory_share, place_processes
from megatron_webrl.placement.placement_table import find_model_config

CONFIGS = Path(__file__).parents[2] / "configs"
ONE_GPU = CONFIGS / "2b_1gpu.yaml"
ROLES: tuple[RoleName, ...] = ("trainer", "rollout")
EIGHT = (
    "cluster.gpus_per_node=8",
    "trainer.data_parallel=0",
    "rollout.engines=0",
    "rollout.tensor_parallel=2",
    "cluster.nodes=2",
)


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


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*_1gpu.yaml")), ids=lambda path: path.stem)
def test_both_roles_of_a_job_on_one_gpu_see_that_gpu(path: Path):
    config = parse_config(path)
    assert devices(config) == {"trainer-0": "0", "rollout-0": "0"}
    found = place_processes(config)
    assert len({process.port for process in found.processes}) == 2
    assert (found.rings[0].workers, found.rings[0].ranks) == ((0,), (0,))


@pytest.mark.parametrize("allocated", ["", "GPU-5c7a"])
def test_a_slurm_job_gives_both_roles_the_gpu_that_it_was_allocated(allocated: str):
    config = parse_config(ONE_GPU)
    inherited = {"CUDA_VISIBLE_DEVICES": allocated} if allocated else {}
    for role in ROLES:
        (spec,) = process_specs(config, place_processes(config), 0, [role], "host:1", inherited, "")
        assert spec.environment["CUDA_VISIBLE_DEVICES"] == (allocated or "0")


def test_each_shared_gpu_has_one_process_of_each_role():
    found = place_processes(made(*EIGHT))
    for node in range(2):
        for role in ROLES:
            held = [gpu for process in found.on_node(node) if process.role == role for gpu in process.devices]
            assert held == list(range(8))
    assert Counter(process.role for process in found.processes) == {"trainer": 16, "rollout": 8}


def test_processes_on_a_shared_gpu_get_cores_of_its_numa_node():
    numa = ('cluster.numa_cores=["0-31","32-63"]', "cluster.nodes=1")
    found = place_processes(made(*EIGHT, *numa))
    for process in found.processes:
        assert {core // 32 for core in process.cores} == {process.devices[0] // 4}
    assert sorted(core for process in found.processes for core in process.cores) == list(range(64))


@pytest.mark.parametrize(
    ("overrides", "through_host"),
    [
        ((), True),
        (("weights.transport=host", "cluster.colocate=false"), True),
        (("cluster.colocate=false",), False),
        (("cluster.colocate=false", "weights.transport=nccl"), False),
        (("cluster.colocate=false", "cluster.gpus_per_node=0"), True),
    ],
)
def test_weights_travel_by_nccl_only_between_gpus_of_their_own(overrides: tuple[str, ...], through_host: bool):
    assert made(*overrides).weights_through_host == through_host


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("weights.transport=nccl",), "NCCL refuses two ranks on one GPU; set weights.transport=auto"),
        (("cluster.gpus_per_node=0",), "cluster.colocate=true has no effect with cluster.gpus_per_node=0"),
        (("cluster.engine_gpus_per_node=1",), "cluster.engine_gpus_per_node=1 has no effect with cluster.colocate"),
        (("rollout.kv_cache_mib=0",), "rollout.kv_cache_mib=0 with cluster.colocate=true"),
        (("rollout.engines=2",), "rollout.engines=2 makes 2 ranks, but 1 nodes have 1 GPUs each for them"),
        (("trainer.tensor_parallel=2",), "makes 2 ranks, but 1 nodes have 1 GPUs each"),
        (("cluster.gpu_gib=60",), "of the same GPU (cluster.colocate), more than cluster.gpu_gib=60; take"),
        (("rollout.gpu_memory_utilization=0.9",), "leaves the trainer 8.0 of cluster.gpu_gib=80, but it needs 59.2"),
        (("rollout.gpu_memory_utilization=0.1",), "leaves the engine 8.0 of cluster.gpu_gib=80, but it needs 16.0 GiB"),
        (("rollout.kv_cache_mib=512",), "rollout.kv_cache_mib=512 holds 4681 tokens, less than rollout.max_model_len"),
    ],
)
def test_what_cannot_share_a_gpu_is_refused(overrides: tuple[str, ...], words: str):
    assert words in refusal(*overrides)


def test_nccl_without_gpus_is_refused():
    with pytest.raises(ConfigError, match=r"weights.transport=nccl needs GPUs, but cluster.gpus_per_node=0"):
        check_cluster(parse_config(None, ["weights.transport=nccl"]))


def test_the_utilization_that_a_refusal_suggests_is_accepted():
    suggested = refusal("rollout.gpu_memory_utilization=0.9").rpartition("about ")[2]
    check(f"rollout.gpu_memory_utilization={suggested}")


def test_roles_that_share_a_gpu_may_share_the_cpu_instead():
    for path in CONFIGS.glob("*_1gpu.yaml"):
        check_cluster(parse_config(path, ["model.platform=cpu"]))
    own = ("cluster.colocate=false", "cluster.gpus_per_node=2", "cluster.engine_gpus_per_node=1")
    assert "cluster.gpus_per_node=2 with model.platform=cpu" in refusal("model.platform=cpu", *own)


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


def test_the_table_shows_both_roles_on_the_gpu_and_the_share_of_each(capsys: pytest.CaptureFixture[str]):
    assert main(["placement", str(ONE_GPU), "--memory"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "2b_1gpu: 1 node of 1 GPU, shared by trainer and engines" in lines
    assert "0 trainer rank 0 0 - any 29501" in lines
    assert "worker 0 0 - any 29502" in lines
    ends = [line.split()[-3:] for line in lines if line.startswith(("trainer 4", "engine 4"))]
    assert ends == [["fits", "its", "61.6"], ["fits", "its", "18.4"]]
    assert "both on one GPU 75.1 fits" in lines
