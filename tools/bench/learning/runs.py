"""Run arms and keep their figures in a folder: a file for each finished run, which is not repeated."""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import flatten_config
from megatron_webrl.track import summary
from megatron_webrl.track.evaluations import (
    EvaluationResult,
    evaluation_name,
    read_evaluations,
    read_results,
    requested_variants,
)
from megatron_webrl.util import atomic_file
from tools.bench.jobs import run_job
from tools.bench.learning.arms import ARMS, CONFIG, INITIAL, overrides


@dataclass(frozen=True)
class TaskSuccess:
    """A held-out task with a verdict."""

    index: int
    environment: str
    success: float  # mean over samples


@dataclass(frozen=True)
class Run:
    """Figures of one finished run, as its file holds them."""

    arm: str
    seed: int
    settings: Mapping[str, Any]  # that differ from the defaults
    minutes: float  # of the whole job
    evaluations: Mapping[str, Sequence[TaskSuccess]]  # by name, such as after_blank_images
    sampled: Sequence[tuple[int, float]]  # version, success of all episodes that it sampled
    metric: float | None  # the arm's metric, mean over updates

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """The run of which `fields` are the JSON form of asdict(run)."""
        evaluations = {name: [TaskSuccess(**each) for each in tasks] for name, tasks in fields["evaluations"].items()}
        sampled = [(version, rate) for version, rate in fields["sampled"]]
        return cls(**{**fields, "evaluations": evaluations, "sampled": sampled})


def changed_settings(words: Sequence[str]) -> dict[str, Any]:
    """Settings of CONFIG with overrides that differ from the defaults, by dotted name. Raises ConfigError."""
    settings, defaults = flatten_config(parse_config(CONFIG, list(words))), flatten_config(Config())
    return {name: value for name, value in settings.items() if value != defaults.get(name)}


class RunFiles:
    """The files of the finished runs: ARM-SEED.json in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, arm: str, seed: int, settings: Mapping[str, Any]) -> Run | None:
        """The finished run of an arm and seed. Raises OSError, and RuntimeError if it had other settings."""
        path = self._path(arm, seed)
        if not path.is_file():
            return None
        run = _read(path)
        names = sorted(run.settings.keys() | settings.keys())
        if different := [name for name in names if run.settings.get(name) != settings.get(name)]:
            raise RuntimeError(
                f"{path} was made with other settings ({', '.join(different)}); delete it, or name another --folder"
            )
        return run

    def read_all(self) -> list[Run]:
        """All finished runs, in the order of the arms and seeds. Raises OSError."""
        order = {name: number for number, name in enumerate((INITIAL, *ARMS))}
        paths = [path for path in self.folder.glob("*.json") if path.stem.rpartition("-")[0] in order]
        return sorted(map(_read, paths), key=lambda run: (order[run.arm], run.seed))

    def write(self, run: Run) -> None:
        """Keep a finished run. Raises OSError."""
        atomic_file.write_json(self._path(run.arm, run.seed), asdict(run))

    def _path(self, arm: str, seed: int) -> Path:
        return self.folder / f"{arm}-{seed}.json"


def _read(path: Path) -> Run:
    return Run.from_json(json.loads(path.read_text()))


def run_arm(arm: str, seed: int, quick: bool, folder: Path, updates: int | None = None) -> Run:
    """Run the job of an arm in `folder`, from its start. Raises RuntimeError if it fails."""
    words, name = overrides(arm, seed, quick, updates), f"{arm}-{seed}"
    shutil.rmtree(folder / "runs" / name, ignore_errors=True)  # of an interrupted call
    started = time.monotonic()
    run = run_job(CONFIG, name, words, folder)
    return read_run(arm, seed, words, run, (time.monotonic() - started) / 60)


def read_run(arm: str, seed: int, words: Sequence[str], run: Path, minutes: float) -> Run:
    """Read the figures of a finished job from its folder. Raises RuntimeError if an evaluation is missing."""
    lines = {evaluation_name(line["kind"], line["variant"]): line for line in read_evaluations(run)}
    kind = "before" if arm == INITIAL else "after"
    wanted = [
        evaluation_name(kind, variant) for variant in requested_variants(parse_config(CONFIG, list(words)).evaluation)
    ]
    if missing := [name for name in wanted if name not in lines]:
        raise RuntimeError(f"{arm}, seed {seed} has no evaluation {', '.join(missing)}; see the job's log")
    updates = summary.read_updates(run)
    rates = [(update["version"] - 1, update["extra"].get("rollout_success_rate")) for update in updates]
    metric = ARMS[arm].metric if arm in ARMS else ""
    values = [value for update in updates if (value := (update["extra"] | update).get(metric)) is not None]
    return Run(
        arm=arm,
        seed=seed,
        settings=changed_settings(words),
        minutes=minutes,
        evaluations={name: task_successes(read_results(run, lines[name])) for name in wanted},
        sampled=[(version, rate) for version, rate in rates if rate is not None],
        metric=fmean(values) if values else None,
    )


def task_successes(results: Sequence[EvaluationResult]) -> list[TaskSuccess]:
    """Success of each task with a verdict, mean over its samples."""
    by_task: dict[tuple[int, str], list[bool]] = defaultdict(list)
    for result in results:
        if result.has_verdict:
            by_task[result.index, result.environment].append(result.outcome == "success")
    return [TaskSuccess(*task, fmean(samples)) for task, samples in sorted(by_task.items())]
