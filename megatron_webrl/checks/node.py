"""`webrl check node`: whether this node can run its part of a job, by itself and together with the other nodes.

The report of each node goes to the run's folder, where `webrl node choose` reads it (launch/slurm/prepare.py).
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.checks.installation import ROLES
from megatron_webrl.checks.processes import run_processes
from megatron_webrl.checks.report import CheckFailed, CheckResult, failed, write_json
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.child_process import MAX_OPEN_FILES
from megatron_webrl.launch import gpus
from megatron_webrl.launch.roles import CACHE_VARIABLES
from megatron_webrl.launch.run_folder import SHARED_MEMORY, report_folder
from megatron_webrl.launch.validation import check_packages, check_sinks
from megatron_webrl.placement.placement import Placement, place_processes
from megatron_webrl.util import torchvision_shim

INSTALLATION_SECONDS, BROWSER_SECONDS = 300.0, 60.0
TEST_PAGE, EXPECTED_HTML = "data:text/html,<p>fit</p>", "<p>fit</p>"
INFINIBAND_DEVICES = Path("/sys/class/infiniband")
LOCKED_MEMORY_GIB = 4  # of one process: NCCL registers buffers of some MiB for each channel and peer
FILES_PER_PROCESS = 8  # connections to each process of the job: control service, and gloo groups of all ranks
FILES_PER_EPISODE = 16  # pages, sockets and screenshots of an episode in its worker and browser server
OTHER_FILES = 1024  # libraries, logs, shared memory, caches
REMOTE_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "wekafs", "panfs"}


# -- checks of a node by itself: each raises CheckFailed, or returns a warning, empty without one ----------------------


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


def check_limits(config: Config, placement: Placement) -> str:
    """The limits of open files and, with InfiniBand, of locked memory are high enough."""
    needed = needed_open_files(config, placement)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # roles raise the soft limit (child_process.py)
    if hard != resource.RLIM_INFINITY and hard < min(needed, MAX_OPEN_FILES):
        raise CheckFailed(
            f"a process may open {hard} files (ulimit -Hn), but one of this job may need {needed}; raise LimitNOFILE "
            "of slurmd, or the limit of the shell that submits the job (PropagateResourceLimits of slurm.conf)"
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = (
        ", ".join(sorted(path.name for path in INFINIBAND_DEVICES.glob("*"))) if config.cluster.gpus_per_node else ""
    )
    if cards and soft != resource.RLIM_INFINITY and soft < LOCKED_MEMORY_GIB * 2**30:
        raise CheckFailed(
            f"a process may lock {soft // 1024} KiB of memory (ulimit -l), but InfiniBand ({cards}) needs unlimited, "
            f"or at least {LOCKED_MEMORY_GIB} GiB; set LimitMEMLOCK=infinity for slurmd and "
            "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf"
        )
    return ""


def needed_open_files(config: Config, placement: Placement) -> int:
    """Upper bound of the open files of any process of the job."""
    episodes = config.rollout.groups_in_flight * config.rollout.group_size  # of a worker
    return OTHER_FILES + FILES_PER_PROCESS * len(placement.processes) + FILES_PER_EPISODE * episodes


def check_gpus(config: Config, placement: Placement) -> str:
    """The number of GPUs, their memory, and the driver."""
    count, gib = config.cluster.gpus_per_node, config.cluster.gpu_gib
    if not count:
        return ""
    try:
        sizes = [row[0] for row in gpus.query_gpus("memory.total")]
    except gpus.NvidiaSmiError as error:
        raise CheckFailed(f"cluster.gpus_per_node={count}, but {error}") from error
    small = [mib for mib in sizes if not mib.isdigit() or int(mib) < 0.95 * gib * 1024]  # "80 GB" is a little less
    if len(sizes) < count:
        problem = f"{len(sizes)} GPUs, but cluster.gpus_per_node={count}"
    elif small:
        problem = f"a GPU has {small[0]} MiB, but cluster.gpu_gib={gib:g}"
    else:
        problem = gpus.find_cuda_problem()
    if problem:
        raise CheckFailed(problem)
    return ""


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
    """Temporary files, and caches of kernels unless they lie there, are on a local disk; else a warning."""
    folders = {name: os.environ[name] for name in CACHE_VARIABLES if os.environ.get(name)}
    mounts, warnings = Path("/proc/mounts").read_text(), list[str]()
    for variable, folder in {**folders, "TMPDIR": tempfile.gettempdir()}.items():
        if (kind := file_system(Path(folder), mounts)) in REMOTE_FILE_SYSTEMS:
            warnings.append(f"{folder} is on {kind}, which all nodes would write; set {variable} to a local folder")
    return "; ".join(warnings)


def file_system(folder: Path, mounts: str) -> str:
    """The type of the file system of a folder. `mounts`: as in /proc/mounts."""
    points = [(point, kind) for _, point, kind, *_ in map(str.split, mounts.splitlines())]
    return max((len(point), kind) for point, kind in points if folder.absolute().is_relative_to(point))[1]


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
    with tempfile.TemporaryDirectory(prefix="webrl-check.") as profile:
        try:
            command = [find_chromium(config.browser.executable), *([] if use_sandbox() else ["--no-sandbox"])]
            command += ["--headless", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
            command += ["--dump-dom", TEST_PAGE]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_SECONDS, check=False)
        except (BrowserError, subprocess.TimeoutExpired, OSError) as error:
            raise CheckFailed(f"Chromium does not start: {error}") from error
    if done.returncode or EXPECTED_HTML not in done.stdout:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CheckFailed(f"{command[0]} loads no page: {lines[-1][:300]}")
    return ""


def check_software(config: Config, placement: Placement) -> str:
    """The packages of both roles are installed and import (`webrl check`), and those that settings need."""
    try:
        check_sinks(config.tracking)
        if not config.evaluation.only:
            check_packages(config.trainer)
    except ConfigError as error:
        raise CheckFailed(str(error)) from error
    [outcome] = run_processes(f"{__package__}.installation:check_installation", [ROLES], INSTALLATION_SECONDS)
    bad = [each.name for each in outcome.results if each.status == "failed" and each.section == "installation"]
    if outcome.error or bad:
        reason = outcome.error or f"missing {', '.join(bad)}"
        raise CheckFailed(f"{reason}; run `webrl check` on the node for details")
    return ""


CHECKS: dict[str, Callable[[Config, Placement], str]] = {
    **{"cores": check_cores, "limits": check_limits, "gpus": check_gpus, "shared memory": check_shared_memory},
    **{"caches": check_caches, "ports": check_ports, "browser": check_browser, "software": check_software},
}


def check_locally(section: str, config: Config, placement: Placement, without: str = "") -> Iterator[CheckResult]:
    """A line for each check but one `without`, with the seconds that it took."""
    for name in (name for name in CHECKS if name != without):
        started_at = time.monotonic()
        try:
            warning = CHECKS[name](config, placement)
        except CheckFailed as error:
            yield failed(section, name, str(error))
        else:
            yield CheckResult(section, name, "passed", round(time.monotonic() - started_at, 2), None, "s", warning)


def check_node(
    config: Config, node: str, nodes: Sequence[str], first_address: str, min_gib_per_second: float = 0.0
) -> list[CheckResult]:
    """Check `node`, this one, with the others of `nodes`, and write its report.

    `first_address`: of the first node; `min_gib_per_second`: least speed of a link. Raises ConfigError if `node` is not
    one of `nodes`.
    """
    if node not in nodes:
        raise ConfigError(f"node {node} (SLURMD_NODENAME) is not one of {', '.join(nodes)}")
    results = list(check_locally(node, config, place_processes(config)))
    gpus, nics = config.cluster.gpus_per_node, config.cluster.nics
    if len(nodes) > 1:
        torchvision_shim.install()
        try:
            from megatron_webrl.checks.network import NodeNetwork

            file = report_folder(config) / "port"
            network = NodeNetwork(node, nodes, first_address, file, gpus, nics, min_gib_per_second)
            results += network.check(all(each.status != "failed" for each in results))
        except ImportError as error:
            results.append(failed(node, "network", f"torch does not import: {error}"))
    write_json(report_folder(config) / f"{node}.json", results)
    return results


def describe_node(results: Sequence[CheckResult]) -> str:
    """The outcome of a node's check in one line."""
    if bad := [f"{each.name}: {each.note}" for each in results if each.status == "failed"]:
        return f"failed the check: {'; '.join(bad)}"
    speeds = ", ".join(f"{each.name} {each.value:g} {each.unit}" for each in results if each.unit == "GiB/s")
    return f"passed the check{': ' if speeds else ''}{speeds}{''.join(f'; {e.note}' for e in results if e.note)}"
