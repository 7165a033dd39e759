"""`webrl train` jobs of tests, and what a job may leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_webrl.system.child_process import OWNER_VARIABLE
from tests.tiny_settings import SETTINGS


@dataclass
class Job:
    """One `webrl train` in a folder of its own."""

    folder: Path
    model: Path
    name: str = "job"
    process: subprocess.Popen[bytes] | None = None
    started: float = field(default_factory=time.time)
    shared_memory: set[str] = field(default_factory=lambda: set(os.listdir("/dev/shm")))

    @property
    def run_folder(self) -> Path:
        return self.folder / "runs" / self.name

    def start(self, *overrides: str, program: Sequence[str] = ("-m", "megatron_webrl.cli")) -> None:
        """Start `webrl train`; `program`: arguments of Python that take its place."""
        path = self.folder / "config.yaml"
        settings = {**SETTINGS, "model": {"path": str(self.model)}}
        settings["run"] = {"name": self.name, "directory": str(self.folder / "runs")}
        path.write_text(yaml.safe_dump(settings))
        command = [sys.executable, *program, "train", str(path), *overrides]
        environment = {key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"}
        with (self.folder / "out.log").open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
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
        command = [sys.executable, "-m", "megatron_webrl.cli", "status", str(self.run_folder), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=False)
        return done.returncode, json.loads(done.stdout)

    def role(self, name: str) -> psutil.Process | None:
        """The process of a role, by what its launcher called it."""
        for process in owned(self.process.pid if self.process else 0):
            try:
                if process.environ().get("WEBRL_ROLE") == name and "megatron_webrl.cli" in " ".join(process.cmdline()):
                    return process
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return None


def owned(launcher: int) -> list[psutil.Process]:
    """Processes that carry the launcher's mark in their environment, zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(OWNER_VARIABLE, "").startswith(f"{launcher}:")
            if marked and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def rings(job: Job) -> list[Path]:
    return list(Path("/dev/shm").glob(f"webrl-{job.name}-*"))


def browsers(since: float) -> list[psutil.Process]:
    """Chromium's processes started later than `since`; most of them hide their environment."""
    found = psutil.process_iter(["name", "create_time", "status"])
    return [
        p
        for p in found
        if "chrom" in p.info["name"] and p.info["create_time"] > since and p.info["status"] != psutil.STATUS_ZOMBIE
    ]


def assert_nothing_left(job: Job) -> None:
    assert job.process is not None
    assert not owned(job.process.pid)
    assert not browsers(job.started)
    assert not set(os.listdir("/dev/shm")) - job.shared_memory
    assert not list(Path(tempfile.gettempdir()).glob(f"webrl-{job.process.pid}-*"))
