"""The import shim, and what an engine's subprocesses get from their sitecustomize."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_webrl.util import torchvision_shim
from tests.waiting import started, until

ROOT = Path(__file__).resolve().parents[2]
SITE = str(torchvision_shim.SITECUSTOMIZE_FOLDER)
SHIM = "import sys; from megatron_webrl.util import torchvision_shim; torchvision_shim.install(); "
PARENT = """
import multiprocessing, os, sys, time
def child():
    print(os.getpid(), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    os.environ["WEBRL_ENGINE_PARENT"] = str(os.getpid())
    multiprocessing.get_context("spawn").Process(target=child).start()
    time.sleep(60)
"""


def python(code: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("torch", "hidden"), [("'2.13.0+cpu'\ncuda: str = None", True), ("'2.13.0'\ncuda: str = '13.0'", False)]
)
def test_a_companion_built_for_cuda_is_hidden_only_beside_cpu_torch(tmp_path: Path, torch: str, hidden: bool) -> None:
    for name, version in (("torch", torch), ("torchaudio", "'2.11.0+cu130'"), ("torchcodec", "'0.14.0+cpu'")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "version.py").write_text(f"__version__ = {version}\n")
    code = "import importlib.util as u; print(*(u.find_spec(f'torch{name}') is None for name in ('audio', 'codec')))"
    assert python(SHIM + code, PYTHONPATH=f"{tmp_path}:{ROOT}") == f"{hidden} False"


def test_a_subprocess_has_the_shim_once_without_heavy_imports_and_the_environments_own_sitecustomize(
    tmp_path: Path,
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.own_site_ran = True")
    code = (
        "import sys; from megatron_webrl.util.torchvision_shim import install; install(); before = [*sys.meta_path]; "
        "install(); print(sys.own_site_ran, before == sys.meta_path, {'torch', 'numpy'} & {*sys.modules}); "
        "import torchvision"
    )
    assert python(code, PYTHONPATH=f"{SITE}:{tmp_path}") == "True True set()"


def test_a_spawned_process_dies_with_its_killed_parent_also_if_that_is_gone_already(tmp_path: Path) -> None:
    script, environment = tmp_path / "parent.py", {**os.environ, "PYTHONPATH": SITE}
    script.write_text(PARENT)
    with started([sys.executable, str(script)], env=environment) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        parent.wait(10)
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of the child", 10)
    environment["WEBRL_ENGINE_PARENT"] = str(parent.pid)
    orphan = subprocess.run([sys.executable, "-c", "print(1)"], env=environment, capture_output=True, timeout=30)
    assert orphan.returncode == -signal.SIGKILL
