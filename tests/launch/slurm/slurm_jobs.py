"""Jobs of launch/slurm on a Slurm of virtual nodes, as a user would submit and see them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from tests.launch.slurm.virtual_slurm import Cluster, free_ports

ROOT = Path(__file__).parents[3]
SCRIPTS = ROOT / "launch" / "slurm"
PAYLOAD = f"{sys.executable} {Path(__file__).with_name('slurm_payload.py')}"
"""In the place of a job's programs."""


def submit(
    cluster: Cluster, folder: Path, script: str, *arguments: str, options: tuple[str, ...] = (), **environment: str
) -> str:
    """sbatch of a script as a user would, its log in `folder`; returns the number of the job."""
    return cluster.submit(
        f"--chdir={ROOT}", f"--output={folder}/job.log", *options, str(SCRIPTS / script), *arguments,
        **{"PYTHON": sys.executable, "SLURM_SUBMIT_DIR": str(ROOT), **environment},
    )  # fmt: skip


def overrides(folder: Path, name: str) -> tuple[str, ...]:
    return (f"run.directory={folder}", f"run.name={name}", f"cluster.base_port={free_ports(20)}")


def log(folder: Path) -> str:
    path = folder / "job.log"
    return path.read_text() if path.is_file() else "no log"


def rings(name: str, memory: Path = Path("/dev/shm")) -> list[Path]:
    return list(memory.glob(f"webrl-{name}-*"))


def leftovers_on(cluster: Cluster, node: str) -> list[str]:
    """Leftovers on a node without jobs: processes, shared memory, files in /tmp."""
    found = []
    for process in cluster.processes(node):
        with suppress(psutil.NoSuchProcess):
            if "megatron_webrl" in " ".join(process.cmdline()) or "chrom" in process.name():
                found.append(f"{process.name()} ({process.pid})")
    memory, files = cluster.path(node, "/dev/shm"), cluster.path(node, "/tmp")
    found += [f"/dev/shm/{name}" for name in os.listdir(memory)]
    found += [f"/tmp/{path.name}" for path in files.glob("webrl-*")]
    return [f"{node}: {each}" for each in found]
