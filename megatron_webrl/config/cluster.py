"""Settings of the machines, cluster.*: docs/slurm.md says how processes are placed on them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.setting import setting


@dataclass
class ClusterConfig:
    nodes: int = setting(1, "Nodes of the job, all alike; both steps run on each.", low=1)
    gpus_per_node: int = setting(0, "GPUs of a node for the job to divide among its roles; 0: none.", low=0)
    engine_gpus_per_node: int = setting(
        0, "GPUs of each node for engines, the last ones; the trainer uses the others.", low=0
    )
    colocate: bool = setting(
        False,
        "Trainer ranks and engines use the same GPUs: engines take rollout.gpu_memory_utilization of their memory, the "
        "trainer the rest (docs/checking.md).",
    )
    gpu_gib: float = setting(80.0, "Memory of one GPU, GiB.", above=0)
    numa_cores: list[str] = setting(
        [],
        'Cores of each NUMA node, numbered as Linux does, such as ["0-31,64-95", "32-63,96-127"]: a '
        "process runs near its GPUs, which lie in order and evenly spread; empty: processes are not bound to cores.",
    )
    nics: list[str] = setting(
        [],
        "Network card nearest to each GPU, such as [mlx5_0, mlx5_1]; the processes of a node use no others; empty: the "
        "libraries choose.",
    )
    base_port: int = setting(
        29500, "First port: the control service's, followed by one for each process of a node.", low=1, high=65535
    )
