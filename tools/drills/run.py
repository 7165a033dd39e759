"""A training job on a cluster of virtual nodes, for fault drills."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import last_line
from megatron_webrl.track import summary
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from tests.launch.slurm.virtual_slurm import END_STATES, Cluster
from tests.tiny_settings import SETTINGS

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "quickstart"
JOB_NODES = 2
FIRST_NODE, SECOND_NODE = "n1", "n2"  # the first one runs the job script and the control service
START_SECONDS, POLL_SECONDS = 900.0, 0.2
EXPECTED_LOG_LINES = "|".join(
    (
        r"job: update \d",
        r"job: [a-z]+:  ",  # summary at the end of the job
        r"srun: cluster configuration lacks support for cpu binding",
        r"\[W\d",  # socket warnings of torch
    )
)
ENDED_SECONDS = 5.0  # a job has ended after this time in an end state: a requeued job is in one for a moment


class DrillError(RuntimeError):
    """A drill that could not finish; the message names the condition it waited for."""


@dataclass
class DrillJob:
    """One job: a trainer rank and an engine on each of two nodes, with a checkpoint after every update."""

    cluster: Cluster
    folder: Path  # parent of the run's folder
    name: str
    job_id: str
    updates: int

    @classmethod
    def submit(cls, cluster: Cluster, folder: Path, python: str, updates: int) -> DrillJob:
        """Submit launch/slurm/train_cpu.sh with sbatch, as a user would."""
        name = folder.name
        settings: dict[str, Any] = {**SETTINGS, "model": {"path": str(MODEL)}}
        settings["run"] = {"name": name, "directory": str(folder)}
        settings["trainer"] = {**SETTINGS["trainer"], "updates": updates, "checkpoint": {"every": 1}}
        (folder / "config.yaml").write_text(yaml.safe_dump(settings))
        job = cluster.submit(
            f"--nodes={JOB_NODES}", f"--chdir={ROOT}", f"--output={folder}/job.log", "--open-mode=append", "--requeue",
            str(ROOT / "launch" / "slurm" / "train_cpu.sh"),
            CONFIG=str(folder / "config.yaml"), PYTHON=python, SLURM_SUBMIT_DIR=str(ROOT), PREFLIGHT="0",
            MLFLOW_TRACKING_URI="",
        )  # fmt: skip
        return cls(cluster, folder, name, job, updates)

    @property
    def run_folder(self) -> Path:
        """The folder of the run."""
        return self.folder / self.name

    def log(self) -> str:
        """The text of the job's log so far."""
        path = self.folder / "job.log"
        return path.read_text(errors="replace") if path.is_file() else ""

    def finished_updates(self) -> list[tuple[int, float]]:
        """Version and unix time of each update so far."""
        with suppress(json.JSONDecodeError):
            return [(update["version"], update["finished_at"]) for update in summary.read_updates(self.run_folder)]
        return []

    def newest_version(self) -> int:
        """The version after the latest update; 0 without updates."""
        return max((version for version, _ in self.finished_updates()), default=0)

    def first_update_after(self, moment: float) -> float:
        """Unix time of the first update after `moment`; 0 if there is none."""
        return min((finished for _, finished in self.finished_updates() if finished > moment), default=0.0)

    def checkpoint_version(self) -> int:
        """Version of the newest complete checkpoint; 0 if there is none."""
        newest = find_latest_checkpoint(self.run_folder)
        return int(newest.name.removeprefix("version-").partition(".")[0]) if newest else 0

    def wait_for(self, condition: Callable[[], Any], what: str, seconds: float) -> Any:
        """Wait until `condition` is true and return its value. Raises DrillError, at once if the job has ended."""
        deadline, ended = time.monotonic() + seconds, None
        while not (value := condition()):
            over = self.state() in END_STATES
            ended = (ended or time.monotonic()) if over else None
            if ended and time.monotonic() - ended > ENDED_SECONDS:
                raise DrillError(f"the job ended ({self.state()}) before {what}: {self.last_log_line()}")
            if time.monotonic() > deadline:
                raise DrillError(f"no {what} within {seconds:.0f} s; the job is {self.state()}: {self.last_log_line()}")
            time.sleep(POLL_SECONDS)
        return value

    def wait_until_ended(self, seconds: float) -> str:
        """Wait until the job has ended, requeues included; return its final state. Raises DrillError."""
        ended: list[float] = []

        def over() -> str:
            state = self.state()
            ended[:] = (ended or [time.monotonic()]) if state in END_STATES else []
            return state if ended and time.monotonic() - ended[0] > ENDED_SECONDS / 2 else ""

        return self.wait_for(over, "end of the job", seconds)

    def state(self) -> str:
        """The job's state in Slurm."""
        return self.cluster.show(self.job_id)["JobState"]

    def restarts(self) -> int:
        """How often Slurm has restarted the job."""
        return int(self.cluster.show(self.job_id)["Restarts"])

    def log_sizes(self) -> dict[Path, int]:
        """Sizes in bytes of the job's log and of the logs of its processes."""
        logs = [self.folder / "job.log", *sorted(self.run_folder.glob("logs/node-*/*.log"))]
        return {path: path.stat().st_size for path in logs if path.is_file()}

    def log_lines_since(self, sizes: Mapping[Path, int]) -> list[str]:
        """Log lines after these sizes: the job's without updates, and warnings and errors of its processes."""
        lines = []
        for path in self.log_sizes():
            with path.open("rb") as file:
                file.seek(sizes.get(path, 0))
                new = file.read().decode(errors="replace").splitlines()
            if path.name == "job.log":
                lines += [line for line in new if line.strip() and not re.match(EXPECTED_LOG_LINES, line)]
            else:
                lines += [f"{path.stem}: {line}" for line in new if re.search(r"\b(WARNING|ERROR)\b", line)]
        return lines

    def last_log_line(self) -> str:
        """The last error or the last line of the job's log."""
        return last_line((self.folder / "job.log").read_text(errors="replace"))

    def role_process(self, node: str, name: str) -> psutil.Process | None:
        """The process of a role by its name, such as trainer-1; not one that it has forked."""
        found = []
        for process in self.cluster.processes(node):
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                role = process.environ().get(child_process.ROLE_VARIABLE)
                if role == name and "-m megatron_webrl " in " ".join(process.cmdline()):
                    found.append((process.create_time(), process.pid, process))
        return min(found)[2] if found else None

    def start_times(self, *roles: tuple[str, str]) -> dict[str, float]:
        """Start times of the given (node, role) processes that run, by role."""
        found = {name: self.role_process(node, name) for node, name in roles}
        return {name: process.create_time() for name, process in found.items() if process is not None}


def leftovers_on(cluster: Cluster, node: str) -> list[str]:
    """Leftovers on a node without jobs: processes, shared memory, files in /tmp."""
    found = []
    for process in cluster.processes(node):
        with suppress(psutil.NoSuchProcess):
            if "megatron_webrl" in " ".join(process.cmdline()) or "chrom" in process.name():
                found.append(f"{process.name()} ({process.pid})")
    memory, files = cluster.path(node, "/dev/shm"), cluster.path(node, "/tmp")
    found += [f"/dev/shm/{name}" for name in os.listdir(memory)]
    found += [f"/tmp/{path.name}" for path in files.glob("webrl-*")]
    return [f"{node}: {each}" for each in found]
