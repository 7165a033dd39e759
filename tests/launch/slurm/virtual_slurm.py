"""A real Slurm of virtual nodes on this machine: one munged, one slurmctld, and a slurmd with a port for each node.

`python -m tests.launch.slurm.virtual_slurm FOLDER --nodes 4` runs a cluster until SIGTERM or until its parent
ends; tests use the context manager `virtual_slurm`. Needs root, and Debian's packages slurm-wlm, munge and iproute2
(tools/install_slurm.sh). Nodes may claim cores and GPUs that the machine does not have: Slurm allocates them and binds
nothing.

With `namespaces` the nodes are isolated like separate machines (tests/launch/slurm/virtual_nodes.py): links can be
cut, and nodes can be lost. Without, they differ only in their ports, and a node's processes are the children of
its slurmd.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from megatron_webrl.control import child_process
from tests.launch.slurm import virtual_nodes

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "squeue")
START_SECONDS = 60.0
PORT_BLOCK = 40
SCRATCH = "virtual-slurm-"
END_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

_taken_ports: set[int] = set()  # blocks of free_ports, by their first port


def why_not(namespaces: bool = False) -> str:
    """Why no cluster can start here; empty if one can."""
    if os.geteuid() != 0:
        return "a Slurm of virtual nodes needs root"
    programs = PROGRAMS + (virtual_nodes.PROGRAMS if namespaces else ())
    missing = [name for name in programs if not shutil.which(name, path=_path())]
    return f"{missing[0]} is not installed: tools/install_slurm.sh" if missing else ""


@dataclass(frozen=True)
class Cluster:
    """A running cluster, its nodes n1, n2, ...; what needs `namespaces` says so."""

    folder: Path
    nodes: int
    namespaces: bool = False

    @property
    def prefix(self) -> list[str]:
        """What a command of a user of this cluster begins with (namespaces): it runs in the cluster's network."""
        return virtual_nodes.within(self._main_process) if self.namespaces else []

    @property
    def _main_process(self) -> int:
        return int((self.folder / "ready").read_text())

    @property
    def environment(self) -> dict[str, str]:
        """That of a user of this cluster, without the mark of the test run: on its nodes jobs belong to nobody."""
        inherited = {name: value for name, value in os.environ.items() if name != child_process.OWNER_VARIABLE}
        return {**inherited, "PATH": _path(), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, **environment: str) -> str:
        """The output of a command of Slurm. Raises AssertionError with what it said if it fails."""
        done = subprocess.run(
            [*self.prefix, *command],
            env=self.environment | environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def submit(self, *arguments: str, **environment: str) -> str:
        """sbatch; returns the number of the job."""
        return self.run("sbatch", "--parsable", *arguments, **environment)

    def show(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        fields = self.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(field.split("=", 1) for field in fields if "=" in field)

    def wait(self, job: str, seconds: float) -> str:
        """The state in which a job has ended. Raises AssertionError if it has not within `seconds`."""
        deadline = time.monotonic() + seconds
        while (state := self.show(job)["JobState"]) not in END_STATES:
            assert time.monotonic() < deadline, f"job {job} is {state} after {seconds:.0f} s"
            time.sleep(0.25)
        return state

    # -- with namespaces --------------------------------------------------------------------------

    def first_process(self, node: str) -> int:
        """Process 1 of a node, as a number of this machine; 0 if the node is off."""
        return virtual_nodes.first_process(int((_files(self.folder, node) / "holder").read_text()))

    def processes(self, node: str) -> list[psutil.Process]:
        """Everything that runs on a node, slurmd included; zombies are left out."""
        found = []
        for pid in virtual_nodes.members(virtual_nodes.space_of(self.first_process(node))):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def path(self, node: str, path: str) -> Path:
        """A path of a running node, as this machine sees it: path("n1", "/dev/shm")."""
        return Path(f"/proc/{self.first_process(node)}/root{path}")

    @contextmanager
    def cut(self, node: str) -> Iterator[None]:
        """A node's cable is pulled out."""
        virtual_nodes.set_link(self._main_process, node, up=False)
        try:
            yield
        finally:
            virtual_nodes.set_link(self._main_process, node, up=True)

    def kill_node(self, node: str) -> None:
        """End everything on a node at once, with its memory and its /tmp, as when its power fails."""
        first = self.first_process(node)
        assert first, f"node {node} is off already"
        space = virtual_nodes.space_of(first)
        os.kill(first, signal.SIGKILL)
        deadline = time.monotonic() + START_SECONDS
        while left := virtual_nodes.members(space):
            assert time.monotonic() < deadline, f"{node} still has processes {left}"
            time.sleep(0.02)


@contextmanager
def virtual_slurm(
    nodes: int,
    gpus: int = 0,
    cores: int = 2,
    namespaces: bool = False,
    shared: Sequence[Path] = (),
    slurmd_seconds: int = 30,
) -> Iterator[Cluster]:
    """A cluster for a test; it and its jobs end with the context. Raises AssertionError if it does not start.

    `shared`: folders of /tmp that nodes in `namespaces` see, in addition to the current one and the cluster's own.
    `slurmd_seconds`: time after which such a node that does not answer is down (SlurmdTimeout).
    """
    child_process.sweep_scratch(SCRATCH)  # left by killed clusters
    # Not one that jobs sweep: they see it, but on nodes in namespaces not who owns it.
    folder = child_process.make_scratch_folder(SCRATCH)
    command = [sys.executable, "-m", "tests.launch.slurm.virtual_slurm", str(folder), "--nodes", str(nodes)]
    command += ["--gpus", str(gpus), "--cores", str(cores), *(["--namespaces"] if namespaces else [])]
    command += ["--slurmd-seconds", str(slurmd_seconds)]
    command += [word for path in shared for word in ("--share", str(path))]
    process = child_process.start_process(command, folder / "cluster.log", os.environ, "virtual-slurm")
    try:
        deadline = time.monotonic() + START_SECONDS + 10
        while not (folder / "ready").exists():
            assert process.poll() is None, (folder / "cluster.log").read_text()
            assert time.monotonic() < deadline, "no cluster: " + (folder / "cluster.log").read_text()
            time.sleep(0.1)
        yield Cluster(folder, nodes, namespaces)
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
    parser.add_argument("--namespaces", action="store_true", help="give each node a network, /tmp, /dev/shm of its own")
    parser.add_argument("--slurmd-seconds", type=int, default=30, help="SlurmdTimeout of nodes in namespaces")
    parser.add_argument("--share", type=Path, action="append", default=[], help="a folder of /tmp that all nodes see")
    options = parser.parse_args()
    if reason := why_not(options.namespaces):
        sys.stderr.write(f"{reason}\n")
        return 1
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    child_process.die_with_parent(signal.SIGTERM)
    child_process.become_subreaper()  # of the processes of jobs, whose slurmd may end before them
    folder = options.folder.absolute()
    folder.mkdir(exist_ok=True)
    try:
        if options.namespaces:
            virtual_nodes.enter_network()
        shared = [folder, Path.cwd(), *(path.absolute() for path in options.share)]
        seconds = options.slurmd_seconds if options.namespaces else 60
        _start(folder, options.nodes, options.gpus, options.cores, shared if options.namespaces else [], seconds)
        cluster = Cluster(folder, options.nodes)
        _await_nodes(cluster, ended)
        (folder / "starting").write_text(str(os.getpid()))
        (folder / "starting").rename(folder / "ready")
        enter = " ".join(virtual_nodes.within(os.getpid())) + " bash; then " if options.namespaces else ""
        sys.stdout.write(f"up; use it with: {enter}export SLURM_CONF={folder}/slurm.conf\n")
        sys.stdout.flush()
        ended.wait()
    finally:
        left = child_process.kill_descendants(20.0)
    return 1 if left else 0


def _start(folder: Path, nodes: int, gpus: int, cores: int, shared: Sequence[Path], slurmd_seconds: int) -> None:
    """Start all daemons; the nodes in namespaces if they have `shared` folders."""
    for name in ("munge", "state", "spool"):
        (folder / name).mkdir(mode=0o755, exist_ok=True)
    folder.chmod(0o755)
    for number in range(gpus):
        os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    key, sock = folder / "munge" / "key", folder / "munge" / "socket"
    subprocess.run(["mungekey", "--create", f"--keyfile={key}"], env={**os.environ, "PATH": _path()}, check=True)
    listed = f"n[1-{nodes}]" if nodes > 1 else "n1"
    (folder / "slurm.conf").write_text(
        _configuration(folder, sock, nodes, listed, gpus, cores, bool(shared), slurmd_seconds)
    )
    (folder / "gres.conf").write_text(f"NodeName={listed} Name=gpu File={folder}/gpu[0-{gpus - 1}]\n" if gpus else "")
    munge = folder / "munge"
    _daemon(folder, "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={sock}",
            f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
    deadline = time.monotonic() + START_SECONDS
    while not sock.exists():
        assert time.monotonic() < deadline, "munged did not start"
        time.sleep(0.02)
    _daemon(folder, "slurmctld", "-c", "-D", "-f", str(folder / "slurm.conf"))
    names = [f"n{number}" for number in range(1, nodes + 1)]
    for number, name in enumerate(names, 1):
        slurmd = ["slurmd", "-D", "-f", str(folder / "slurm.conf"), "-N", name]
        if not shared:
            _daemon(folder, *slurmd, log=f"slurmd-{name}")
            continue
        own = _files(folder, name)
        command = virtual_nodes.command(name, number, names, shared, own, slurmd)
        (own / "holder").write_text(str(holder := _daemon(folder, *command, log=f"slurmd-{name}")))
        virtual_nodes.connect(name, holder)


def _files(folder: Path, node: str) -> Path:
    """Where this machine keeps what belongs to a node."""
    return folder / "nodes" / node


def _configuration(
    folder: Path, sock: Path, nodes: int, names: str, gpus: int, cores: int, apart: bool, slurmd_seconds: int
) -> str:
    host = socket.gethostname()
    port = free_ports(nodes + 1)
    own = virtual_nodes.address(0) if apart else "127.0.0.1"
    lines = [
        "ClusterName=virtual", f"SlurmctldHost={host}({own})", f"SlurmctldPort={port}", "SlurmUser=root",
        "SlurmdUser=root", "AuthType=auth/munge", f"AuthInfo=socket={sock},cred_expire=10", "CredType=cred/munge",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool/%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/slurmd-%n.pid",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none", "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core", "SwitchType=switch/none", "MpiDefault=none", "ReturnToService=2",
        "SlurmdParameters=config_overrides", "SchedulerParameters=sched_interval=2,batch_sched_delay=0", "KillWait=5",
        "SlurmctldTimeout=60", f"SlurmdTimeout={slurmd_seconds}", "TreeWidth=64", "MinJobAge=600",
        *(["GresTypes=gpu"] if gpus else []),
    ]  # fmt: skip
    gres = f" Gres=gpu:{gpus}" if gpus else ""
    for number in range(1, nodes + 1):
        place = f"NodeHostname=n{number} NodeAddr={virtual_nodes.address(number)} Port={port + 1}"
        if not apart:
            place = f"NodeHostname={host} NodeAddr=127.0.0.1 Port={port + number}"
        lines.append(f"NodeName=n{number} {place} CPUs={cores} RealMemory=1000{gres} State=UNKNOWN")
    lines.append(f"PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE")
    return "\n".join(lines) + "\n"


def _daemon(folder: Path, program: str, *arguments: str, log: str = "") -> int:
    """Start one; returns its process number."""
    environment = {**os.environ, "PATH": _path()}
    return child_process.start_process(
        [program, *arguments], folder / f"{log or program}.log", environment, log or program
    ).pid


def _await_nodes(cluster: Cluster, ended: threading.Event) -> None:
    command, deadline = ["sinfo", "-h", "-o", "%D %T"], time.monotonic() + START_SECONDS
    said = ""
    while not ended.is_set() and said.split() != [str(cluster.nodes), "idle"]:
        assert time.monotonic() < deadline, f"the nodes are not idle: {said}"
        said = subprocess.run(command, env=cluster.environment, stdout=subprocess.PIPE, text=True, check=False).stdout
        time.sleep(0.1)


def free_ports(count: int) -> int:
    """The first of `count` consecutive free ports outside the range of outgoing connections.

    This process keeps them by a lock, so that nobody else draws them before something listens there.
    """
    assert count <= PORT_BLOCK
    for first in range(21000, 32000, PORT_BLOCK):
        if first in _taken_ports:
            continue
        try:
            fcntl.lockf(_port_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, PORT_BLOCK, first)
            for port in range(first, first + count):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        _taken_ports.add(first)
        return first
    raise AssertionError(f"no {count} free ports")


@functools.cache
def _port_locks() -> int:
    """The file whose locks show all processes which blocks of ports are taken."""
    return os.open(Path(tempfile.gettempdir(), "webrl-test-ports"), os.O_CREAT | os.O_RDWR)


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"


if __name__ == "__main__":
    sys.exit(main())
