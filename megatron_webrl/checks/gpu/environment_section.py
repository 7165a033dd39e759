"""Section "environment": versions, driver, limits, shared memory, and the machine against cluster.*."""

from __future__ import annotations

import importlib.metadata
import os
import platform as python_platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement

from megatron_webrl.checks.gpu.request import GpuCheckRequest
from megatron_webrl.checks.gpu.results import CheckResult, failed, measured, skipped
from megatron_webrl.checks.gpu.topology import read_topology, topology_problems
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.preflight import local_checks
from megatron_webrl.launch.preflight.local_checks import CheckFailed
from megatron_webrl.launch.roles import gpu_environment
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.util import cuda_driver, torchvision_shim

SECTION = "environment"
PACKAGE = "megatron_webrl"
EXTRAS = {"cpu": ("trainer", "rollout", "cpu"), "cuda": ("trainer", "rollout", "gpu")}
CACHES = {
    "VLLM_CACHE_ROOT": "~/.cache/vllm",
    "TRITON_CACHE_DIR": "~/.triton",
    "FLASHINFER_WORKSPACE_BASE": "~",
    "TMPDIR": "/tmp",
}
REMOTE_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "fuse.sshfs", "wekafs", "panfs"}


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Look at this machine; nothing is computed."""
    torchvision_shim.install()
    yield from _devices(request)
    yield from _packages(request.platform)
    yield from _node_checks(request.config, request.platform)
    yield from _topology(request.config, request.platform)
    mounts = Path("/proc/mounts").read_text()
    for variable, folder in cache_folders(request.config, os.environ).items():
        yield check_cache(variable, folder, mounts)


def _devices(request: GpuCheckRequest) -> Iterator[CheckResult]:
    import torch

    yield measured(SECTION, "Python", python_platform.python_version())
    yield measured(SECTION, "torch, built for CUDA", f"{torch.__version__}, {torch.version.cuda or 'none'}")
    if request.cuda_problem:
        yield failed(SECTION, "driver", request.cuda_problem)
        return
    try:
        yield check_driver(request.platform, torch.version.cuda, cuda_driver.find_driver())
    except cuda_driver.NvidiaSmiError as error:
        yield (failed if request.platform == "cuda" else skipped)(SECTION, "driver", str(error))
    if request.platform == "cuda":
        yield measured(SECTION, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        yield measured(SECTION, "GPUs", ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)))


def check_driver(platform: str, cuda: str | None, driver: cuda_driver.CudaDriver) -> CheckResult:
    """Whether the driver fits torch, built for CUDA version `cuda`; on the CPU it does not matter."""
    problem = cuda_driver.driver_problem(cuda, driver) if platform == "cuda" else ""
    if problem:
        return failed(SECTION, "driver", problem)
    return measured(SECTION, "driver", cuda_driver.describe_driver(driver))


def _packages(platform: str) -> Iterator[CheckResult]:
    """Installed versions against the pins of this package's extras."""
    wanted = {}
    for requirement in map(Requirement, importlib.metadata.requires(PACKAGE) or []):
        marker = requirement.marker
        if requirement.specifier and (not marker or any(marker.evaluate({"extra": each}) for each in EXTRAS[platform])):
            wanted[requirement.name] = requirement.specifier
    for name, specifier in wanted.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield failed(SECTION, f"package {name}", f"is not installed; {specifier} is needed")
            continue
        if specifier.contains(version, prereleases=True):
            yield measured(SECTION, f"package {name}", version)
        else:
            yield failed(SECTION, f"package {name}", f"{version} does not fit {specifier}")


def _node_checks(config: Config, platform: str) -> Iterator[CheckResult]:
    """The checks of `webrl node check` that need no other node."""
    try:
        placement = place_processes(config)
    except ConfigError as error:
        yield failed(SECTION, "placement", str(error))
        return
    for name, check_node in local_checks.CHECKS.items():
        if name == "gpus" and platform == "cpu":
            yield skipped(SECTION, name, "the check runs on the CPU")
            continue
        try:
            check_node(config, placement)
        except CheckFailed as error:
            yield failed(SECTION, name, str(error))
        else:
            yield measured(SECTION, name, "ok")


def _topology(config: Config, platform: str) -> Iterator[CheckResult]:
    cluster = config.cluster
    if platform == "cpu":
        cluster = replace(cluster, gpus_per_node=0, gpu_numa=[])
    if not cluster.numa_cores and not cluster.gpus_per_node:
        yield skipped(SECTION, "topology", "the configuration names no cores and GPUs (cluster.*)")
        return
    problems = topology_problems(cluster, read_topology())
    if problems:
        yield from (failed(SECTION, "topology", problem) for problem in problems)
    else:
        yield measured(SECTION, "topology", "as in cluster.*")


def cache_folders(config: Config, inherited: Mapping[str, str]) -> dict[str, str]:
    """The folder of each variable of CACHES, as an engine of this configuration gets it."""
    inherited = {"TMPDIR": CACHES["TMPDIR"], **inherited}
    environment = {**inherited, **gpu_environment(config, "rollout", inherited)}
    return {variable: environment.get(variable) or os.path.expanduser(default) for variable, default in CACHES.items()}


def check_cache(variable: str, folder: str, mounts: str) -> CheckResult:
    """Whether a folder of caches is on a local disk. `mounts`: the lines of /proc/mounts."""
    path = Path(folder).absolute()
    best = ("", "")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind)
    if best[1] in REMOTE_FILE_SYSTEMS:
        note = f"{folder} is on {best[1]}, which all nodes would write at once; set {variable} to a local folder"
        return failed(SECTION, f"cache {variable}", note)
    return measured(SECTION, f"cache {variable}", f"{folder} ({best[1]})")
