"""A real job with a canary in every secret it has, and a search for them.

Canaries are keys, tokens, and the passwords of addresses, in its environment. None may be in the environment of a
browser's process, the command line of any process, a file of the run (logs, configuration, pages, checkpoints), its
output, or MLflow's database, artifacts and log.
"""

from __future__ import annotations

import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.launch.whole_jobs import Job
from tests.track.mlflow_server import MLflowServer

JOB_SECONDS = 400.0
MARK = "canary"
BROWSER_NAMES = ("chrom", "headless", "node")


@dataclass
class Findings:
    """What the search has covered and found: the name of the canary's variable, and where it was."""

    browser_processes: int = 0
    command_lines: int = 0
    files: int = 0
    mib: float = 0.0
    exit_code: int | None = None
    leaks: list[str] = field(default_factory=list)
    open_files: list[str] = field(default_factory=list)  # paths of the run that others than their owner may read

    @property
    def passed(self) -> bool:
        searched = min(self.browser_processes, self.command_lines, self.files)
        return self.exit_code == 0 and searched > 0 and not self.leaks and not self.open_files


def make_canaries() -> dict[str, str]:
    """A value for each secret variable of a job."""
    names = (
        "JUDGE_KEY",
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "WEBRL_BROWSERS_TOKEN",
        "MLFLOW",
        "PROXY",
        "WEBRL_MONITOR_TOKEN",
    )
    return {name: f"{MARK}-{name.lower().replace('_', '')}-{secrets.token_hex(8)}" for name in names}


def job_environment(canaries: Mapping[str, str], server: MLflowServer) -> dict[str, str]:
    """Variables of the job: MLflow's and the proxy's canaries are passwords in addresses."""
    plain = {name: value for name, value in canaries.items() if name not in ("MLFLOW", "PROXY")}
    proxy, local = f"http://someone:{canaries['PROXY']}@127.0.0.1:9", "127.0.0.1,localhost"
    return plain | {
        "MLFLOW_TRACKING_URI": server.uri.replace("://", f"://someone:{canaries['MLFLOW']}@"),
        "HTTPS_PROXY": proxy, "https_proxy": proxy, "NO_PROXY": local, "no_proxy": local,
    }  # fmt: skip


def search_job(job: Job, server: MLflowServer, judge_url: str, updates: int, *overrides: str) -> Findings:
    """Run the job and search it while it runs and afterwards. `overrides`: further settings."""
    canaries, found = make_canaries(), Findings()
    judge = ("judge.evaluators=[judge]", "judge.verdict.name=oracle", f"judge.verdict.url={judge_url}")
    job.start(
        f"trainer.updates={updates}", "tracking.keep_records=true", *judge, "judge.verdict.key_variable=JUDGE_KEY",
        *overrides, environment=job_environment(canaries, server),
    )  # fmt: skip
    assert job.process is not None
    browsers, commands = set(), set()
    deadline = time.monotonic() + JOB_SECONDS
    while job.process.poll() is None and time.monotonic() < deadline:
        for process in job.processes():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                commands.add("\0".join(process.cmdline()))
                if process.name().startswith(BROWSER_NAMES):
                    browsers.add(process.pid)
                    found.leaks += _leaks(canaries, str(process.environ()), f"environment of {process.name()}")
        time.sleep(0.1)
    found.exit_code = job.process.poll()
    found.browser_processes, found.command_lines = len(browsers), len(commands)
    for command in commands:
        found.leaks += _leaks(canaries, command, f"command line {command[:60]!r}")
    for path in _files(job.run_folder, job.folder / "out.log", server.folder):
        content = path.read_bytes()
        found.files, found.mib = found.files + 1, found.mib + len(content) / 2**20
        found.leaks += _leaks(canaries, content.decode("latin-1"), str(path.relative_to(job.folder.parent)))
    for path in (job.run_folder, *job.run_folder.rglob("*")):
        if not path.is_symlink() and path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            found.open_files.append(f"{path.relative_to(job.run_folder)} {stat.filemode(path.stat().st_mode)}")
    found.leaks = sorted(set(found.leaks))
    return found


def _files(*places: Path) -> Iterator[Path]:
    for place in places:
        yield from [place] if place.is_file() else (path for path in place.rglob("*") if path.is_file())


def _leaks(canaries: Mapping[str, str], text: str, place: str) -> list[str]:
    return [f"{name} in {place}" for name, value in canaries.items() if value in text] if MARK in text else []
