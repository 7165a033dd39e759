"""Jobs, their episodes, browsers and agents from Python: docs/python.md."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.child_process import ChildProcess, start_process
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.launch.validation import check_job, check_tasks_and_browser, load_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.monitor.status import find_run, read_config
from megatron_webrl.rollout.agent import Episode
from megatron_webrl.rollout.demonstrations import ScriptedGenerator, scripted_generation
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.track.episodes import StoredEpisode, read_episodes
from megatron_webrl.track.metrics import UPDATES_FILE, update_metrics
from megatron_webrl.types import Action, Observation, Step, Task, Trajectory, Verdict
from megatron_webrl.util.history import Tail

__all__ = [
    "Action", "Config", "ConfigError", "Job", "JobError", "Observation", "Policy", "Processor", "Rollouts", "Step",
    "StoredEpisode", "Task", "Trajectory", "Verdict", "episodes", "evaluate", "find_run", "load_config",
    "open_rollouts", "read_config", "train",
]  # fmt: skip

POLL_SECONDS = 0.5
Policy = Callable[[str, Sequence[bytes]], str | Awaitable[str]]
"""Responds to a prompt: its text, with one image token for each of the encoded screenshots, as the model reads it."""


class JobError(RuntimeError):
    """A job has failed; the message has the last line of its log."""


class _Command:
    """A webrl command in a process of its own, which ends when this process does; `log` has what it shows."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """`folder` of the log. Raises ProcessError outside of the main thread."""
        self.log, self._name = folder / "log", f"webrl {arguments[0]}"
        command = [sys.executable, "-m", "megatron_webrl", *arguments]
        self._process: ChildProcess = start_process(command, self.log, dict(os.environ), self._name)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the end. Raises JobError if it fails, and subprocess.TimeoutExpired after `seconds`."""
        code = self._process.wait(seconds)
        if code not in (0, -signal.SIGINT, 128 + signal.SIGINT):
            raise JobError(f"{self._name} has failed: {self._process.describe_end()}")

    def stop(self, seconds: float = 120.0) -> None:
        """End it as Ctrl-C does: training after the current update, with a checkpoint; at once after `seconds`."""
        if self.is_running:
            os.kill(self._process.pid, signal.SIGINT)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class Job(_Command):
    """A training job on this machine in a process of its own. It ends with this process, or when its block is left."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._files = tempfile.TemporaryDirectory(prefix="webrl-job-")
        self._file = Path(self._files.name, "config.yaml")
        save_config(config, self._file)
        super().__init__(self._file.parent, "train", str(self._file))

    @property
    def folder(self) -> Path:
        """The run's folder; an earlier one of the same name is renamed as the job starts."""
        return self.config.run_folder

    def updates(self) -> Iterator[dict[str, float]]:
        """The metrics of each update as it ends (docs/metrics.md), until the job ends. Raises JobError if it fails."""
        tail, running = Tail(self.folder / UPDATES_FILE), True
        while running:
            running = self.is_running
            stored = self.folder / "config.yaml"
            if stored.is_file() and stored.stat().st_mtime >= self._file.stat().st_mtime:  # not of an earlier run
                for line in tail.poll():
                    yield {"version": line["version"], **update_metrics(line)}
            time.sleep(POLL_SECONDS if running else 0)
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        self._files.cleanup()


def train(config: Config) -> Job:
    """Check a configuration and start a training job on this machine. Raises ConfigError and ProcessError."""
    check_job(config)
    return Job(config)


def evaluate(checkpoint: str | Path, overrides: Sequence[str] = (), seconds: float | None = None) -> dict[str, Any]:
    """Evaluate a checkpoint, or a run, on held-out tasks; returns what `webrl eval --json` writes (docs/evaluation.md).

    Raises JobError, also for bad input, ProcessError, and subprocess.TimeoutExpired after `seconds`.
    """
    with tempfile.TemporaryDirectory(prefix="webrl-evaluation-") as folder:
        result = Path(folder) / "result.json"
        command = _Command(Path(folder), "eval", str(checkpoint), *overrides, "--json", str(result))
        try:
            command.wait(seconds)
        finally:
            command.stop()
        found: dict[str, Any] = json.loads(result.read_text())
    return found


def episodes(run: str | Path) -> Iterator[StoredEpisode]:
    """The stored episodes of a run, by path or by name in runs/, oldest first by worker: steps with tokens and images,
    verdicts. A run stores them with tracking.episodes_gib. Raises ConfigError for no run, RecordError for broken files.
    """
    return read_episodes(find_run(str(run)))


class _PolicyGenerator:
    """Asks a policy in place of an engine; its tokens have log-probabilities of 0."""

    def __init__(self, processor: Processor, policy: Policy) -> None:
        self._processor, self._policy = processor, policy

    async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        response = self._policy(self._processor.tokenizer.decode(token_ids), images)
        text = await response if inspect.isawaitable(response) else response
        return scripted_generation(self._processor, token_ids, images, str(text))


class Rollouts:
    """Episodes with the task source, browsers, context and evaluators of a configuration (`open_rollouts`)."""

    def __init__(self, runner: EpisodeRunner) -> None:
        self._runner, self._count = runner, 0
        self.processor: Processor = runner.agent.processor

    def held_out_task(self, number: int) -> Task:
        """The number-th task of evaluations. Raises ConfigError without one."""
        return self._runner.task_source.held_out_task(number)

    async def run(self, policy: Policy | None, task: Task) -> Trajectory:
        """One judged episode; None: the task's scripted policy. Faults mask it, as `outcome` says.

        What the policy raises is raised.
        """
        rollout = self._runner.config.rollout
        self._count += 1
        live = self._runner.live.open("rollout", self._count, 0, 1, task)
        if policy is None:
            generator: Any = ScriptedGenerator(self.processor, rollout, self._runner.agent.toolset)
        else:
            generator = _PolicyGenerator(self.processor, policy)
        return await self._runner.run_try(generator, Episode(rollout, live, in_training=False))

    def open_session(self) -> AbstractAsyncContextManager[RemoteSession]:
        """A browser session: `reset(task)` opens the task's page, `step(action)` acts; both return an Observation."""
        return self._runner.agent.browsers.session()


@asynccontextmanager
async def open_rollouts(config: Config, sessions: int = 4) -> AsyncIterator[Rollouts]:
    """Start browsers for `sessions` episodes at a time, and what else episodes need, but no engine.

    Raises ConfigError, ProcessError and BrowserError.
    """
    check_tasks_and_browser(config)
    rollout = replace(config.rollout, groups_in_flight=1, group_size=sessions, stepping="free")
    with tempfile.TemporaryDirectory(prefix="webrl-rollouts-") as folder:  # of the logs
        run = replace(config.run, directory=folder)
        config = replace(config, rollout=rollout, run=run)
        processor, meter = Processor.load(config.model.path), LocalMeter(config.judge.budget)
        async with EpisodeRunner.open(config, processor, "rollouts", meter) as runner:
            yield Rollouts(runner)
