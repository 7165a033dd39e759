"""Start-up hook of every Python subprocess of an engine; runs before any of its own code.

1. The process dies with its parent, so that a killed worker leaves no engine behind.
2. SIGUSR2 writes its stacks to standard error, as in every role (megatron_webrl/util/stack_dump.py).
3. It gets the import shim of its parent (megatron_webrl/util/torchvision_shim.py).
4. It imports vLLM without garbage collections, until `collect_garbage` (megatron_webrl/util/child_process.py).
5. The environment's own sitecustomize, which this one hides, runs.
"""

import ctypes
import faulthandler
import gc
import importlib.machinery
import importlib.util
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARENT_VARIABLE = "WEBRL_ENGINE_PARENT"  # process id of the nearest ancestor with this hook
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the parent ends; kill this process if the parent has ended already."""
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


def delay_garbage_collection() -> None:
    """Collect no garbage in an engine's own processes while they import: it is a quarter of that time."""
    if "multiprocessing.spawn" in " ".join(sys.orig_argv):
        gc.disable()


def load(name: str, spec: importlib.machinery.ModuleSpec) -> object:
    """Execute one module without leaving it in sys.modules."""
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None, name
    spec.loader.exec_module(module)
    return module


def install_torchvision_shim() -> None:
    """Run torchvision_shim.install from its file: the package itself may not be on the path yet."""
    spec = importlib.util.spec_from_file_location("_webrl_torchvision_shim", HERE.parent / "torchvision_shim.py")
    if spec is not None:
        load("_webrl_torchvision_shim", spec).install()  # type: ignore[attr-defined]


def run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that would have run without this folder on the path."""
    elsewhere = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None:
        load("sitecustomize", spec)


die_with_parent()
faulthandler.register(signal.SIGUSR2, 2, all_threads=True)
delay_garbage_collection()
install_torchvision_shim()
run_hidden_sitecustomize()
