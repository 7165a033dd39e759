"""The import cure and what an engine's subprocesses get from their sitecustomize."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_webrl.util import torchvision_shim

ROOT = Path(__file__).resolve().parents[2]


def python(code: str, **variables: str) -> str:
    """Run code in a fresh interpreter at the checkout; returns what it printed."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_torchvision_imports_after_the_cure() -> None:
    code = (
        "from megatron_webrl.util import torchvision_shim; torchvision_shim.install(); torchvision_shim.install();"
        "import torchvision; print('there')"
    )
    assert python(code) == "there"


def test_the_cure_itself_imports_nothing_heavy_and_takes_effect_once() -> None:
    code = (
        "import sys; from megatron_webrl.util import torchvision_shim;"
        "torchvision_shim.install(); before = list(sys.meta_path);"
        "torchvision_shim.install();"
        "print(before == sys.meta_path, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert python(code) == "True False False"


@pytest.mark.parametrize(
    ("torch", "hidden"), [("'2.13.0+cpu'\ncuda: str = None", True), ("'2.13.0'\ncuda: str = '13.0'", False)]
)
def test_a_companion_built_for_cuda_is_hidden_only_beside_cpu_torch(tmp_path: Path, torch: str, hidden: bool) -> None:
    for name, version in (("torch", torch), ("torchaudio", "'2.11.0+cu130'"), ("torchcodec", "'0.14.0+cpu'")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "version.py").write_text(f"__version__ = {version}\n")
    code = (
        "import importlib.util as u; from megatron_webrl.util import torchvision_shim; torchvision_shim.install();"
        "print(u.find_spec('torchaudio') is None, u.find_spec('torchcodec') is None)"
    )
    assert python(code, PYTHONPATH=f"{tmp_path}:{ROOT}") == f"{hidden} False"


def test_a_subprocess_is_cured_without_doing_anything() -> None:
    assert (
        python("import torchvision; print('there')", PYTHONPATH=str(torchvision_shim.SITECUSTOMIZE_FOLDER)) == "there"
    )


def test_the_environments_own_sitecustomize_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own_site_ran = True")
    path = f"{torchvision_shim.SITECUSTOMIZE_FOLDER}:{tmp_path}"
    assert python("import sys; print(sys.own_site_ran)", PYTHONPATH=path) == "True"


def _ends(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


_PARENT = """
import multiprocessing, os, sys, time
def child():
    print(os.getpid(), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    os.environ["WEBRL_ENGINE_PARENT"] = str(os.getpid())
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(60)
"""


def test_a_spawned_process_dies_with_its_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environment = {**os.environ, "PYTHONPATH": str(torchvision_shim.SITECUSTOMIZE_FOLDER)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    assert _ends(child, 10)


def test_a_process_whose_parent_is_gone_already_ends_at_once() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    environment = {
        **os.environ,
        "PYTHONPATH": str(torchvision_shim.SITECUSTOMIZE_FOLDER),
        "WEBRL_ENGINE_PARENT": str(gone.pid),
    }
    orphan = subprocess.run([sys.executable, "-c", "print(1)"], env=environment, capture_output=True, timeout=30)
    assert orphan.returncode == -signal.SIGKILL
