"""Runs first in every Python subprocess of an engine, before any of its own code.

The process dies with its parent, so that a worker killed outright leaves no engine behind, shows its stacks at SIGUSR2
as every role does (megatron_webrl/system/stack_dump.py), and gets the same import cure as the parent. Then the environment's own
sitecustomize, which this one hides, runs.
"""

import ctypes
import faulthandler
import importlib.machinery
import importlib.util
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARENT_VARIABLE = "WEBRL_ENGINE_PARENT"  # process id of the nearest ancestor that takes part
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL at the parent's end, and see that the end did not come before the request."""
    parent = os.environ.get(PARENT_VARIABLE)
    # The resource tracker must outlive its parent: it is what removes the parent's shared memory.
    if parent is None or not sys.platform.startswith("linux") or "resource_tracker" in " ".join(sys.orig_argv):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        os.kill(int(parent), 0)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())


def load(name: str, spec: importlib.machinery.ModuleSpec) -> object:
    """Execute one module without leaving it in sys.modules."""
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None, name
    spec.loader.exec_module(module)
    return module


def cure_imports() -> None:
    """Run megatron_webrl.system.torchvision_shim.install from its file: the package itself may not be on the path yet."""
    spec = importlib.util.spec_from_file_location("_webrl_torchvision_shim", HERE.parent / "torchvision_shim.py")
    if spec is not None:
        load("_webrl_torchvision_shim", spec).install()  # type: ignore[attr-defined]


def chain() -> None:
    """Run the sitecustomize that would have run without this folder on the path."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None:
        load("sitecustomize", spec)


die_with_parent()
faulthandler.register(signal.SIGUSR2, 2, all_threads=True)
cure_imports()
chain()
