"""A real Slurm of virtual nodes on this machine: one munged, one slurmctld, and a slurmd with a port for each node.

`python -m tests.virtual_slurm FOLDER --nodes 4` runs one until SIGTERM, or until the process that started it ends;
`virtual_slurm` is the same for tests. Needs root, and Debian's packages slurm-wlm and munge (tools/install_slurm.sh).
Nodes claim cores and GPUs that the machine need not have: Slurm hands them out, and binds nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from megatron_webrl import processes

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue")
START_SECONDS = 60.0
END_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")


def why_not() -> str:
    """Why no cluster can start here; empty if one can."""
    if os.geteuid() != 0:
        return "a Slurm of virtual nodes needs root"
    missing = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    return f"{missing[0]} is not installed: tools/install_slurm.sh" if missing else ""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, its nodes n1, n2, ..."""

    folder: Path
    nodes: int

    @property
    def environment(self) -> dict[str, str]:
        """That of a user of this cluster."""
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, seconds: float = 60.0, **environment: str) -> str:
        """The output of a command of Slurm. Raises AssertionError with what it said if it fails."""
        done = subprocess.run(
            command, env=self.environment | environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **environment: str) -> str:
        """sbatch; returns the number of the job."""
        return self.run("sbatch", "--parsable", *arguments, **environment)

    def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, seconds: float) -> str:
        """The state in which a job has ended. Raises AssertionError if it has not within `seconds`."""
        deadline = time.monotonic() + seconds
        while (state := self.show(job)["JobState"]) not in END_STATES:
            assert time.monotonic() < deadline, f"job {job} is {state} after {seconds:.0f} s"
            time.sleep(0.25)
        return state


@contextmanager
def virtual_slurm(nodes: int, gpus: int = 0, cores: int = 2) -> Iterator[Cluster]:
    """A cluster for a test; it and its jobs end with the context. Raises AssertionError if it does not start."""
    folder = processes.scratch_folder()  # which the next start of anything sweeps, should this process be killed
    command = [sys.executable, "-m", "tests.virtual_slurm", str(folder), "--nodes", str(nodes)]
    command += ["--gpus", str(gpus), "--cores", str(cores)]
    process = processes.start(command, folder / "cluster.log", os.environ, "virtual-slurm")
    try:
        deadline = time.monotonic() + START_SECONDS + 10
        while not (folder / "ready").exists():
            assert process.poll() is None, (folder / "cluster.log").read_text()
            assert time.monotonic() < deadline, "no cluster: " + (folder / "cluster.log").read_text()
            time.sleep(0.1)
        yield Cluster(folder, nodes)
    finally:
        process.terminate()
        process.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Run a cluster until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--cores", type=int, default=2)
    options = parser.parse_args()
    if reason := why_not():
        sys.stderr.write(f"{reason}\n")
        return 1
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    processes.die_with_parent(signal.SIGTERM)
    processes.become_subreaper()  # of the processes of jobs, whose slurmd may end before them
    folder = options.folder.absolute()
    folder.mkdir(exist_ok=True)
    try:
        _start(folder, options.nodes, options.gpus, options.cores)
        _await_nodes(Cluster(folder, options.nodes), ended)
        (folder / "ready").touch()
        sys.stdout.write(f"up; use it with: export SLURM_CONF={folder}/slurm.conf\n")
        sys.stdout.flush()
        ended.wait()
    finally:
        left = processes.kill_descendants(20.0)
    return 1 if left else 0


def _start(folder: Path, nodes: int, gpus: int, cores: int) -> None:
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755, exist_ok=True)
    folder.chmod(0o755)
    for number in range(gpus):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    key, sock = folder / "munge" / "key", folder / "munge" / "socket"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], env={**os.environ, "PATH": _path()}, check=True)
    names = f"n[1-{nodes}]" if nodes > 1 else "n1"
    (folder / "slurm.conf").write_text(_configuration(folder, sock, nodes, names, gpus, cores))
    (folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else "")
    munge = folder / "munge"
    _daemon(folder, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not sock.exists():
        assert time.monotonic() < deadline, "munged did not start"
        time.sleep(0.02)
    _daemon(folder, "slurmctld", "-c", "-D", "-f", str(folder / "slurm.conf"))
    for number in range(1, nodes + 1):
        _daemon(folder, "slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", f"n{number}", log=f"slurmd-n{number}")


def _configuration(folder: Path, sock: Path, nodes: int, names: str, gpus: int, cores: int) -> str:
    host = socket.gethostname()
    port = free_ports(nodes + 1)
    lines = [
        "ClusterName=virtual", f"SlurmctldHost={host}(127.0.0.1)", f"SlurmctldPort={port}", "SlurmUser=root",
        "SlurmdUser=root", "AuthType=auth/munge", f"AuthInfo=socket={sock},cred_expire=10", "CredType=cred/munge",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core", "SwitchType=switch/none", "MpiDefault=none", "ReturnToService=2",
        "SlurmdParameters=config_overrides", "SchedulerParameters=sched_interval=2,batch_sched_delay=0", "KillWait=5",
        "SlurmctldTimeout=60", "SlurmdTimeout=60", "TreeWidth=64", "MinJobAge=600",
        *(["GresTypes=gpu"] if gpus else []),
    ]  # fmt: skip
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    for number in range(1, nodes + 1):
        lines.append(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port + number} CPUs={cores} "
            f"RealMemory=1000{gres} State=UNKNOWN"
        )
    lines.append(f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE")
    return "\n".join(lines) + "\n"


def _daemon(folder: Path, program: str, *arguments: str, log: str = "") -> None:
    environment = {**os.environ, "PATH": _path()}
    processes.start([program, *arguments], folder / f"{log or program}.log", environment, log or program)


def _await_nodes(cluster: Cluster, ended: threading.Event) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ended.is_set():
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%D %T"], env=cluster.environment, capture_output=True, text=True, check=False
        )
        if done.stdout.split() == [str(cluster.nodes), "idle"]:
            return
        assert time.monotonic() < deadline, f"the nodes are not idle: {done.stdout}{done.stderr}"
        time.sleep(0.2)


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has, out of the range that outgoing connections use."""
    starts = list(range(21000, 32000, count))
    random.SystemRandom().shuffle(starts)  # others may be looking, too
    for first in starts:
        try:
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError(f"no {count} free ports")


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


if __name__ == "__main__":
    sys.exit(main())
