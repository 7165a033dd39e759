"""`webrl check node`: whether this node can run its part of a job, by itself and together with the other nodes.

The report of each node goes to the run's folder, where `webrl node choose` reads it (launch/node_reports.py).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.checks.report import CheckFailed, CheckResult, failed, write_json
from megatron_webrl.config.cluster import ClusterConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch import roles
from megatron_webrl.launch.node_reports import report_folder
from megatron_webrl.launch.roles import gpu_environment
from megatron_webrl.launch.validation import SHARED_MEMORY, check_packages
from megatron_webrl.placement.cores import format_cores, parse_cores
from megatron_webrl.placement.placement import Placement, place_processes
from megatron_webrl.util import cuda_driver, torchvision_shim
from megatron_webrl.util.child_process import MAX_OPEN_FILES

INSTALLATION_SECONDS = 300.0
BROWSER_SECONDS = 60.0
TEST_PAGE, EXPECTED_HTML = "data:text/html,<p>fit</p>", "<p>fit</p>"
INFINIBAND_DEVICES = Path("/sys/class/infiniband")
LOCKED_MEMORY_GIB = 4  # of one process: NCCL registers buffers of some MiB for each channel and peer
FILES_PER_PROCESS = 8  # connections to each process of the job: control service, and gloo groups of all ranks
FILES_PER_EPISODE = 16  # pages, sockets and screenshots of an episode in its worker and browser server
OTHER_FILES = 1024  # libraries, logs, shared memory, caches
CACHES = {
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TRITON_CACHE_DIR": "~/.triton",
    "FLASHINFER_WORKSPACE_BASE": "~",
    "TMPDIR": "/tmp",
}
REMOTE_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "wekafs", "panfs"}


# -- a node by itself: each check raises CheckFailed, or returns a warning, empty without one -----------------


def check_cores(config: Config, placement: Placement) -> str:
    """This job may use the cores of the placement."""
    available = os.sched_getaffinity(0)
    missing = sorted({core for process in placement.on_node(0) for core in process.cores} - available)
    if missing:
        raise CheckFailed(
            f"{len(missing)} cores of cluster.numa_cores, core {missing[0]} first, are not among the "
            f"{len(available)} of this job; ask for whole nodes (--exclusive), or correct cluster.numa_cores"
        )
    return ""


def check_limits(config: Config, placement: Placement, infiniband: Path = INFINIBAND_DEVICES) -> str:
    """The limits of open files and, with network cards in `infiniband`, of locked memory are high enough."""
    problems, needed = [], needed_open_files(config, placement)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # roles raise the soft limit (child_process.py)
    if hard != resource.RLIM_INFINITY and hard < min(needed, MAX_OPEN_FILES):
        problems.append(
            f"a process may open {hard} files (ulimit -Hn), but one of this job may need {needed}; raise LimitNOFILE "
            "of slurmd, or the limit of the shell that submits the job (PropagateResourceLimits of slurm.conf)"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = _names(infiniband) if config.cluster.gpus_per_node else []
    if cards and soft != resource.RLIM_INFINITY and soft < LOCKED_MEMORY_GIB * 2**30:
        problems.append(
            f"a process may lock {soft // 1024} KiB of memory (ulimit -l), but InfiniBand ({', '.join(cards)}) needs "
            f"unlimited, or at least {LOCKED_MEMORY_GIB} GiB; set LimitMEMLOCK=infinity for slurmd and "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        )
    if problems:
        raise CheckFailed("; ".join(problems))
    return ""


def needed_open_files(config: Config, placement: Placement) -> int:
    """Upper bound of the open files of any process of the job."""
    episodes = config.rollout.groups_in_flight * config.rollout.group_size  # of a worker
    return OTHER_FILES + FILES_PER_PROCESS * len(placement.processes) + FILES_PER_EPISODE * episodes


def check_gpus(config: Config, placement: Placement) -> str:
    """The number of GPUs, their memory, and the driver."""
    cluster = config.cluster
    if not cluster.gpus_per_node:
        return ""
    try:
        check_gpu_memory(config, [row[0] for row in cuda_driver.query_visible_gpus("memory.total")])
        problem = cuda_driver.driver_problem(cuda_driver.torch_cuda_version(), cuda_driver.find_driver())
    except cuda_driver.NvidiaSmiError as error:
        raise CheckFailed(f"cluster.gpus_per_node={cluster.gpus_per_node}, but {error}") from error
    except ImportError as error:
        raise CheckFailed(f"torch does not import: {error}") from error
    if problem:
        raise CheckFailed(problem)
    return ""


def check_gpu_memory(config: Config, mib: Sequence[str]) -> None:
    """Check the GPUs' memory sizes in MiB, as nvidia-smi lists them. Raises CheckFailed."""
    cluster = config.cluster
    if len(mib) < cluster.gpus_per_node:
        raise CheckFailed(f"{len(mib)} GPUs, but cluster.gpus_per_node={cluster.gpus_per_node}")
    # An "80 GB" card reports a little less.
    small = [text for text in mib if not text.isdigit() or int(text) < 0.95 * cluster.gpu_gib * 1024]
    if small:
        raise CheckFailed(f"a GPU has {small[0]} MiB, but cluster.gpu_gib={cluster.gpu_gib:g}")


def check_topology(config: Config, placement: Placement) -> str:
    """NUMA nodes, GPUs and network cards are as cluster.* says; else a warning."""
    return "; ".join(topology_problems(config.cluster, read_topology()))


def check_shared_memory(config: Config, placement: Placement) -> str:
    """The ring fits in shared memory, if there is one."""
    status, needed = os.statvfs(SHARED_MEMORY), config.ring.capacity_mib
    free = status.f_bavail * status.f_frsize // 2**20
    if free < needed and not config.evaluation.only:
        raise CheckFailed(
            f"{SHARED_MEMORY} has {free} MiB free, but ring.capacity_mib needs {needed}; enlarge it (mount -o "
            "remount,size=...), remove files there, or lower ring.capacity_mib"
        )
    return ""


def check_caches(config: Config, placement: Placement) -> str:
    """Caches of kernels and temporary files of an engine are on a local disk; else a warning."""
    mounts = Path("/proc/mounts").read_text()
    found = (cache_problem(*each, mounts) for each in cache_folders(config, os.environ).items())
    return "; ".join(filter(None, found))


def cache_folders(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """The folder of each variable of CACHES, as an engine of this configuration gets it."""
    inherited = {"TMPDIR": CACHES["TMPDIR"], **inherited}
    environment = {**inherited, **gpu_environment(config, "rollout", inherited)}
    return {variable: environment.get(variable) or os.path.expanduser(default) for variable, default in CACHES.items()}


def cache_problem(variable: str, folder: str, mounts: str) -> str:
    """Why a folder of caches should be elsewhere; empty if it is on a local disk. `mounts`: as in /proc/mounts."""
    path, best = Path(folder).absolute(), ("", "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    if best[1] not in REMOTE_FILE_SYSTEMS:
        return ""
    return f"{folder} is on {best[1]}, which all nodes would write at once; set {variable} to a local folder"


def check_ports(config: Config, placement: Placement) -> str:
    """The ports of the placement are free."""
    for port in (placement.control_port, *(process.port for process in placement.on_node(0))):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
            try:
                probe.bind(("", port))
            except OSError as error:
                raise CheckFailed(
                    f"port {port} is not free ({error.strerror}); end the process that uses it or set cluster.base_port"
                ) from error
    return ""


def check_browser(config: Config, placement: Placement) -> str:
    """Chromium starts and loads a page, unless browser.servers names others'."""
    if config.browser.servers:
        return ""
    try:
        program = find_chromium(config.browser.executable)
    except BrowserError as error:
        raise CheckFailed(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="webrl-check.") as profile:
        command = [program, "--headless", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        command += [*([] if use_sandbox() else ["--no-sandbox"]), "--dump-dom", TEST_PAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"{program} loaded no page within {BROWSER_SECONDS:.0f} s") from None
        except OSError as error:
            raise CheckFailed(f"{program} does not start: {error.strerror}") from error
    if done.returncode or EXPECTED_HTML not in done.stdout:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CheckFailed(f"{program} loads no page: {lines[-1][:300]}")
    return ""


def check_software(config: Config, placement: Placement) -> str:
    """The packages of both roles are installed and import (`webrl check`), and those of the trainer's settings."""
    if not config.evaluation.only:
        try:
            check_packages(config.trainer)
        except ConfigError as error:
            raise CheckFailed(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="webrl-check.") as folder:
        path = Path(folder) / "installation.json"
        command = roles.webrl_command(["check", "installation", "--json", str(path)])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALLATION_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"webrl check did not finish within {INSTALLATION_SECONDS:.0f} s") from None
        if not path.is_file():
            raise CheckFailed(f"webrl check failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
        results = json.loads(path.read_text())["results"]
    bad = [each["name"] for each in results if each["status"] == "failed" and each["section"] == "installation"]
    if bad:
        raise CheckFailed(f"missing {', '.join(bad)}; run `webrl check` on the node for details")
    return ""


CHECKS: dict[str, Callable[[Config, Placement], str]] = {
    "cores": check_cores,
    "limits": check_limits,
    "gpus": check_gpus,
    "topology": check_topology,
    "shared memory": check_shared_memory,
    "caches": check_caches,
    "ports": check_ports,
    "browser": check_browser,
    "software": check_software,
}


def check_locally(
    section: str, config: Config, placement: Placement, checks: Sequence[str] = tuple(CHECKS)
) -> Iterator[CheckResult]:
    """A line for each check, with the seconds that it took."""
    for name in checks:
        started_at = time.monotonic()
        try:
            warning = CHECKS[name](config, placement)
        except CheckFailed as error:
            yield failed(section, name, str(error))
        else:
            yield CheckResult(section, name, "passed", round(time.monotonic() - started_at, 2), None, "s", warning)


# -- topology -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Topology:
    """What the kernel and the driver say."""

    numa_cores: tuple[frozenset[int], ...]  # of each NUMA node
    gpu_numa: tuple[int | None, ...]  # of each visible GPU; None: the kernel does not say
    nics: Sequence[str]  # InfiniBand devices


def read_topology(root: Path = Path("/sys")) -> Topology:
    """Read sysfs at `root`, and the GPUs' addresses from nvidia-smi if it is there."""
    nodes = sorted((root / "devices/system/node").glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    cores = tuple(frozenset(parse_cores(text)) for path in nodes if (text := (path / "cpulist").read_text().strip()))
    try:
        addresses = [row[0] for row in cuda_driver.query_visible_gpus("pci.bus_id")]
    except cuda_driver.NvidiaSmiError:
        addresses = []
    return Topology(cores, tuple(_numa_of(root, each) for each in addresses), _names(root / "class/infiniband"))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def _numa_of(root: Path, address: str) -> int | None:
    domain, _, rest = address.lower().partition(":")
    file = root / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    number = int(file.read_text()) if file.is_file() else -1
    return number if number >= 0 else None


def topology_problems(cluster: ClusterConfig, machine: Topology) -> Iterator[str]:
    """How the machine differs from what cluster.* says, in one line each."""
    everything = frozenset().union(*machine.numa_cores)
    numa_cores = [frozenset(parse_cores(text)) for text in cluster.numa_cores]
    for index, cores in enumerate(numa_cores):
        name = f"cluster.numa_cores[{index}]={cluster.numa_cores[index]}"
        if missing := cores - everything:
            yield f"{name}: the machine has no core {min(missing)} (`lscpu`)"
        elif not any(cores <= node for node in machine.numa_cores):
            nodes = "; ".join(format_cores(sorted(node)) for node in machine.numa_cores)
            yield f"{name} spans NUMA nodes, which are {nodes} (`lscpu`)"
    found = len(machine.gpu_numa)
    if found < cluster.gpus_per_node:
        yield f"cluster.gpus_per_node={cluster.gpus_per_node}, but {found} GPUs are visible (CUDA_VISIBLE_DEVICES)"
    elif numa_cores:
        for gpu, node in enumerate(machine.gpu_numa[: cluster.gpus_per_node]):
            index = cluster.gpu_numa[gpu] if cluster.gpu_numa else gpu * len(numa_cores) // cluster.gpus_per_node
            if node is not None and node < len(machine.numa_cores) and not numa_cores[index] & machine.numa_cores[node]:
                yield (
                    f"GPU {gpu} is at NUMA node {node}, but cluster.gpu_numa puts it at the cores "
                    f"{cluster.numa_cores[index]} (`nvidia-smi topo -m`)"
                )
    for name in dict.fromkeys(cluster.nics):
        if name not in machine.nics:
            has = ", ".join(machine.nics) or "none"
            yield f"cluster.nics names {name}, but the machine has {has} (/sys/class/infiniband)"


# -- the nodes of a job -----------------------------------------------------------------------------------------


@dataclass
class NodeCheck:
    """The check of one node, at the same time as those of the job's other nodes."""

    config: Config
    node: str
    nodes: Sequence[str]  # of the job; the first hosts the store of the network check
    first_address: str  # of the first node
    min_gib_per_second: float = 0.0  # least speed of a link between neighbours
    devices: int = 1  # processes that stand for GPUs on a node without any
    message_bytes: int = 64 * 2**20  # of an all-reduce
    link_seconds: float = 30.0  # limit of a first link
    checks: Sequence[str] = tuple(CHECKS)

    def __post_init__(self) -> None:
        """Raises ConfigError for a node that is not one of the job's."""
        if self.node not in self.nodes:
            raise ConfigError(f"node {self.node} (SLURMD_NODENAME) is not one of {', '.join(self.nodes)}")

    def run(self) -> list[CheckResult]:
        """Run all checks; writes the report."""
        results: list[CheckResult] = []
        try:
            for each in self._check():
                results.append(each)
        except CheckFailed as error:
            results.append(failed(self.node, "network", str(error)))
        write_json(report_folder(self.config) / f"{self.node}.json", results)
        return results

    def _check(self) -> Iterator[CheckResult]:
        """Lines of this node alone, then of its network. Raises CheckFailed if the nodes do not meet."""
        passed = True
        for each in check_locally(self.node, self.config, place_processes(self.config), self.checks):
            passed = passed and each.status != "failed"
            yield each
        cluster = self.config.cluster
        if len(self.nodes) < 2 and not cluster.gpus_per_node and self.devices < 2:
            return
        torchvision_shim.install()
        try:
            from megatron_webrl.checks.node_network import NodeDevices, check_network
        except ImportError as error:
            raise CheckFailed(f"torch does not import: {error}") from error
        count, cuda = cluster.gpus_per_node or self.devices, cluster.gpus_per_node > 0
        devices = NodeDevices(self.node, count, cuda, cluster.nics, self.message_bytes)
        file = report_folder(self.config) / "port"
        yield from check_network(
            devices, self.nodes, self.first_address, file, passed, self.min_gib_per_second, self.link_seconds
        )


def run_node_check(config: Config, nodes: Sequence[str], address: str, minimum: float) -> int:
    """Check this node and print the result. Returns 0 for a bad node, too: `webrl node choose` excludes it."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["megatron_webrl.checks.node_network"])
    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    results = NodeCheck(config, name, nodes, address, minimum).run()
    if bad := [f"{each.name}: {each.note}" for each in results if each.status == "failed"]:
        text = f"failed the check: {'; '.join(bad)}"
    else:
        speeds = ", ".join(f"{each.name} {each.value:g} {each.unit}" for each in results if each.unit == "GiB/s")
        warnings = "".join(f"; {each.note}" for each in results if each.note)
        text = f"passed the check{': ' if speeds else ''}{speeds}{warnings}"
    sys.stdout.write(f"node {name} {text}\n")
    if multiprocessing.active_children():  # a call of a hung GPU's driver cannot be killed, nor waited for
        sys.stdout.flush()
        os._exit(0)
    return 0
