"""`webrl train` jobs of tests, and what a job may leave behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_webrl.control.child_process import OWNER_VARIABLE, die_with_parent
from tests.launch.slurm.virtual_nodes import space_of
from tests.terminal import Terminal
from tests.tiny_settings import SETTINGS

HOLDER = "mount -t tmpfs tmpfs /dev/shm && echo made && exec sleep infinity"


@dataclass
class Job:
    """One `webrl train` in a folder of its own.

    Where the user may create namespaces, it also has a mount namespace and a /dev/shm of its own: all of its processes
    and shared memory are known, and tests of jobs may run side by side. A holder keeps both until `close`. Elsewhere
    only what carries the job's mark or name is known.
    """

    folder: Path
    model: Path
    name: str = "job"
    process: subprocess.Popen[bytes] | None = None
    holder: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        holder = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", HOLDER],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent,
        )
        assert holder.stdout is not None
        self.holder = holder if holder.stdout.readline() else None

    def close(self) -> None:
        for process in (self.process, self.holder):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()

    @property
    def memory(self) -> Path:
        """The job's /dev/shm."""
        return Path(f"/proc/{self.holder.pid}/root" if self.holder else "/", "dev", "shm")

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.name

    def start(
        self, *overrides: str, environment: Mapping[str, str] | None = None, terminal: Terminal | None = None
    ) -> None:
        """Start `webrl train`; `environment`: variables to add. `terminal`: to run on, in place of a log; it is the
        process's own.
        """
        path = self.folder / "config.yaml"
        path.write_text(yaml.safe_dump({**SETTINGS, "model": {"path": str(self.model)}}))
        run = (f"run.name={self.name}", f"run.directory={self.folder / 'runs'}")
        command = self._command("train", str(path), *run, *overrides)
        variables = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        variables |= environment or {}
        with (self.folder / "out.log").open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=terminal.slave if terminal else None,
                stdout=terminal.slave if terminal else output,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,
                preexec_fn=terminal.become_controlling if terminal else None,
            )

    def wait(self, seconds: float) -> int:
        assert self.process is not None
        return self.process.wait(seconds)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = 240.0) -> Any:
        assert self.process is not None
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert self.process.poll() is None, f"the job ended before {what}:\n{self.output()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.output()}"
            time.sleep(0.1)
        return found

    def output(self) -> str:
        return (self.folder / "out.log").read_text()

    def updates(self) -> list[dict[str, Any]]:
        path = self.run_folder / "updates.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_folder / "summary.json").read_text())

    def status(self) -> tuple[int, dict[str, Any]]:
        """Exit code and report of `webrl status`."""
        command = self._command("status", str(self.run_folder), "--json")
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=False)
        return done.returncode, json.loads(done.stdout)

    def processes(self) -> list[psutil.Process]:
        """What runs of the job: every process in its namespace, else those with the mark of its launcher."""
        if self.holder is not None:
            space = space_of(self.holder.pid, "mnt")
            mine = [p for p in psutil.process_iter() if space_of(p.pid, "mnt") == space and p.pid != self.holder.pid]
            return [process for process in mine if _alive(process)]
        mark = f"{self.process.pid if self.process else 0}:"
        return [p for p in psutil.process_iter() if _mark(p).startswith(mark) and _alive(p)]

    def shared_memory(self) -> list[Path]:
        """Everything in the job's /dev/shm, else its rings."""
        return self.rings() if self.holder is None else list(self.memory.iterdir())

    def rings(self) -> list[Path]:
        return list(self.memory.glob(f"webrl-{self.name}-*"))

    def role(self, name: str) -> psutil.Process | None:
        """The process of a role, by what its launcher called it."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if process.environ().get("WEBRL_ROLE") == name and "-m megatron_webrl " in " ".join(process.cmdline()):
                    return process
        return None

    def _command(self, *arguments: str) -> list[str]:
        """A `webrl` command in the job's namespace."""
        inside = ["nsenter", f"--mount=/proc/{self.holder.pid}/ns/mnt", f"--wd={os.getcwd()}"] if self.holder else []
        return [*inside, sys.executable, "-m", "megatron_webrl", *arguments]


def make_run(folder: Path, checkpoint: Path, **settings: Any) -> Path:
    """Make the folder of a run with a checkpoint; `settings`: of its config.yaml."""
    shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name)
    (folder / "checkpoints" / "latest").write_text(checkpoint.name)
    (folder / "config.yaml").write_text(yaml.safe_dump({**SETTINGS, **settings}))
    return folder


def assert_nothing_left(job: Job) -> None:
    assert job.process is not None
    assert not job.processes()
    assert not job.shared_memory()
    assert not list(Path(tempfile.gettempdir()).glob(f"webrl-{job.process.pid}-*"))


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _mark(process: psutil.Process) -> str:
    """The mark of its owner in a process's environment."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.environ().get(OWNER_VARIABLE, "")
    return ""
