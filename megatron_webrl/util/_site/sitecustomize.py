"""Start-up hook of every Python subprocess of an engine; runs before any of its own code.

1. The process dies with its parent, so that a killed worker leaves no engine behind.
2. SIGUSR2 writes its stacks to standard error, as in every role (megatron_webrl/control/child_process.py).
3. It gets the import shim of its parent (megatron_webrl/util/torchvision_shim.py).
4. It imports vLLM without garbage collections, until `collect_garbage` (megatron_webrl/control/child_process.py).
5. The environment's own sitecustomize, which this one hides, runs.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

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


def run(file: Path) -> dict[str, Any]:
    """Execute a file: the package itself may not be on the path yet. Returns its names."""
    names: dict[str, Any] = {"__name__": file.stem, "__file__": str(file)}
    exec(compile(file.read_text(), file, "exec"), names)
    return names


def run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that would have run without this folder on the path."""
    for folder in map(Path, sys.path):
        if folder.resolve() != HERE and (file := folder / "sitecustomize.py").is_file():
            run(file)
            break


die_with_parent()
faulthandler.register(signal.SIGUSR2, 2, all_threads=True)
delay_garbage_collection()
run(HERE.parent / "torchvision_shim.py")["install"]()
run_hidden_sitecustomize()
