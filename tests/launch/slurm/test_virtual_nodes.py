"""Virtual nodes in namespaces: as apart as machines are, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.slurm.test_slurm import check_that_a_cluster_dies_with_its_starter, running
from tests.launch.slurm.virtual_nodes import address
from tests.launch.slurm.virtual_slurm import Cluster, virtual_slurm, why_not
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(why_not(namespaces=True)), reason=why_not(namespaces=True) or "-")

PORT = 21099  # of a network of its own, where nobody else can have it


@pytest.fixture(scope="module")
def apart() -> Iterator[Cluster]:
    with virtual_slurm(2, namespaces=True) as cluster:
        yield cluster


def on(cluster: Cluster, node: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command on a node, past Slurm."""
    return subprocess.run([*cluster.on(node), *command], capture_output=True, text=True, timeout=20, check=False)


def reaches(cluster: Cluster, node: str, other: str) -> bool:
    """Whether a node gets an answer from the slurmd of another."""
    port = cluster.run("scontrol", "show", "node", "--oneliner", other).partition(" Port=")[2].split()[0]
    program = f"import socket; socket.create_connection(('{other}', {port}), 1)"
    return on(cluster, node, sys.executable, "-I", "-S", "-c", program).returncode == 0


def test_each_node_has_its_own_name_address_memory_and_process_ids(apart: Cluster) -> None:
    command = (
        'echo "$(hostname) $(hostname -I) $(getent ahostsv4 n2 | head -n 1 | cut -d " " -f 1) '
        '$(ls /dev/shm | wc -l) $(test -e /proc/$PPID && echo seen)"; touch /dev/shm/mine /tmp/mine'
    )
    said = apart.run("srun", "--nodes=2", "--chdir=/", "sh", "-c", command).splitlines()
    assert sorted(line.split() for line in said) == [
        [f"n{number}", address(number), address(2), "0", "seen"] for number in (1, 2)
    ]
    for node in ("n1", "n2"):
        assert apart.path(node, "/dev/shm/mine").exists()
        assert apart.path(node, "/tmp/mine").exists()
        assert {process.name() for process in apart.processes(node)} >= {"slurmd"}
    assert not Path("/dev/shm/mine").exists()
    mine, other = ({process.pid for process in apart.processes(node)} for node in ("n1", "n2"))
    assert not mine & other


def test_a_cut_link_is_a_partition_until_it_is_restored(apart: Cluster) -> None:
    assert reaches(apart, "n1", "n2")
    apart.cut("n2")
    try:
        assert not reaches(apart, "n1", "n2")
        assert not reaches(apart, "n2", "n1")
        assert reaches(apart, "n2", "n2")
    finally:
        apart.mend("n2")
    until(lambda: reaches(apart, "n1", "n2"), "the mended link", 10)


@pytest.mark.slow
def test_a_lost_node_is_seen_down_and_returns_empty() -> None:
    marker = f"31{os.getpid()}"  # seconds that a task of this test sleeps
    with virtual_slurm(2, namespaces=True) as cluster:
        job = cluster.submit("--nodes=2", "--no-requeue", "--output=/dev/null", f"--wrap=srun --nodes=2 sleep {marker}")
        until(lambda: len(running("sleep", marker)) == 2, "both tasks to run", 30)
        cluster.path("n2", "/dev/shm/left").touch()
        cluster.kill_node("n2")
        assert not cluster.processes("n2")
        assert len(running("sleep", marker)) == 1
        cluster.wait_node("n2", ("down",), 120)
        assert cluster.wait(job, 60) == "NODE_FAIL"
        cluster.start_node("n2")
        assert cluster.run("srun", "--nodes=1", "--nodelist=n2", "--chdir=/", "ls", "/dev/shm") == ""


def test_nothing_of_a_cluster_is_left_when_its_parent_is_killed() -> None:
    check_that_a_cluster_dies_with_its_starter("virtual_slurm(2, namespaces=True)")
    cards = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "to-n1" not in cards  # it was in a network of its own, which is gone
