"""Checks of one node by itself: software, shared memory, browser, ports, cores, limits, GPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_webrl.browser.chromium import find_chromium, use_sandbox
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch import roles
from megatron_webrl.launch.preflight import resource_limits
from megatron_webrl.launch.validation import SHARED_MEMORY, check_packages
from megatron_webrl.placement.placement import Placement
from megatron_webrl.util import cuda_driver

DOCTOR_SECONDS = 180.0
BROWSER_SECONDS = 60.0
GROUP_SECONDS = 30.0  # limit for forming a group of two nodes and exchanging data in it
MESSAGE_BYTES = 64 * 2**20  # of an all-reduce
_TEST_PAGE, _EXPECTED_HTML = "data:text/html,<p>fit</p>", "<p>fit</p>"


class CheckFailed(RuntimeError):
    """A check of the node failed. The message gives the reason and the remedy."""


def check_software(config: Config, placement: Placement) -> None:
    """Check the packages of both roles (`webrl doctor`) and of the trainer's settings. Raises CheckFailed."""
    if not config.evaluation.only:
        try:
            check_packages(config.trainer)
        except ConfigError as error:
            raise CheckFailed(str(error)) from error
    command = roles.webrl_command(["doctor", "--json"])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOCTOR_SECONDS, check=False)
        missing = json.loads(done.stdout)["missing"]
    except subprocess.TimeoutExpired:
        raise CheckFailed(f"webrl doctor did not finish within {DOCTOR_SECONDS:.0f} s") from None
    except ValueError:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise CheckFailed(f"webrl doctor failed: {lines[-1]}") from None
    if packages := sorted({package for packages in missing.values() for package in packages}):
        raise CheckFailed(f"missing {', '.join(packages)}; run `webrl doctor` on the node for details")


def check_shared_memory(config: Config, placement: Placement) -> None:
    """Check that the ring fits in shared memory, if there is one. Raises CheckFailed."""
    if config.evaluation.only:
        return
    status, needed = os.statvfs(SHARED_MEMORY), config.ring.capacity_mib
    free = status.f_bavail * status.f_frsize // 2**20
    if free < needed:
        raise CheckFailed(
            f"{SHARED_MEMORY} has {free} MiB free, but ring.capacity_mib needs {needed}; enlarge it (mount -o "
            "remount,size=...), remove files there, or lower ring.capacity_mib"
        )


def check_browser(config: Config, placement: Placement) -> None:
    """Check that Chromium starts and loads a page, unless the job uses a farm. Raises CheckFailed."""
    if config.browser.farm:
        return
    try:
        program = find_chromium(config.browser.executable)
    except BrowserError as error:
        raise CheckFailed(str(error)) from error
    with tempfile.TemporaryDirectory(prefix="webrl-check.") as profile:
        command = [program, "--headless", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
        command += [*([] if use_sandbox() else ["--no-sandbox"]), "--dump-dom", _TEST_PAGE]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=BROWSER_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"{program} loaded no page within {BROWSER_SECONDS:.0f} s") from None
        except OSError as error:
            raise CheckFailed(f"{program} does not start: {error.strerror}") from error
    if done.returncode or _EXPECTED_HTML not in done.stdout:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CheckFailed(f"{program} loads no page: {lines[-1][:300]}")


def check_ports(config: Config, placement: Placement) -> None:
    """Check that the ports of the placement are free. Raises CheckFailed."""
    for port in (placement.control_port, *(process.port for process in placement.on_node(0))):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT counts as free
            try:
                probe.bind(("", port))
            except OSError as error:
                raise CheckFailed(
                    f"port {port} is not free ({error.strerror}); end the process that uses it or set cluster.base_port"
                ) from error


def check_cores(config: Config, placement: Placement) -> None:
    """Check that this job may use the cores of the placement. Raises CheckFailed."""
    available = os.sched_getaffinity(0)
    missing = sorted({core for process in placement.on_node(0) for core in process.cores} - available)
    if missing:
        raise CheckFailed(
            f"{len(missing)} cores of cluster.numa_cores, core {missing[0]} first, are not among the "
            f"{len(available)} of this job; ask for whole nodes (--exclusive), or correct cluster.numa_cores"
        )


def check_gpus(config: Config, placement: Placement) -> None:
    """Check the number of GPUs, their memory, and that the driver fits torch. Raises CheckFailed."""
    cluster = config.cluster
    if not cluster.gpus_per_node:
        return
    try:
        check_gpu_memory(config, [row[0] for row in cuda_driver.query_visible_gpus("memory.total")])
        problem = cuda_driver.driver_problem(cuda_driver.torch_cuda_version(), cuda_driver.find_driver())
    except cuda_driver.NvidiaSmiError as error:
        raise CheckFailed(f"cluster.gpus_per_node={cluster.gpus_per_node}, but {error}") from error
    except ImportError as error:
        raise CheckFailed(f"torch does not import: {error}") from error
    if problem:
        raise CheckFailed(problem)


def check_gpu_memory(config: Config, mib: Sequence[str]) -> None:
    """Check the GPUs' memory sizes in MiB, as nvidia-smi lists them. Raises CheckFailed."""
    cluster = config.cluster
    if len(mib) < cluster.gpus_per_node:
        raise CheckFailed(f"{len(mib)} GPUs, but cluster.gpus_per_node={cluster.gpus_per_node}")
    # An "80 GB" card reports a little less.
    small = [text for text in mib if not text.isdigit() or int(text) < 0.95 * cluster.gpu_gib * 1024]
    if small:
        raise CheckFailed(f"a GPU has {small[0]} MiB, but cluster.gpu_gib={cluster.gpu_gib:g}")


def check_limits(config: Config, placement: Placement, infiniband: Path = resource_limits.INFINIBAND_DEVICES) -> None:
    """Check the limits of open files and, with devices in `infiniband`, of locked memory. Raises CheckFailed."""
    problems = [resource_limits.open_files_problem(resource_limits.needed_open_files(config, placement))]
    if config.cluster.gpus_per_node:
        problems.append(resource_limits.locked_memory_problem(infiniband))
    if any(problems):
        raise CheckFailed("; ".join(filter(None, problems)))


CHECKS: dict[str, Callable[[Config, Placement], None]] = {
    "cores": check_cores,
    "limits": check_limits,
    "gpus": check_gpus,
    "shared memory": check_shared_memory,
    "ports": check_ports,
    "browser": check_browser,
    "software": check_software,
}
