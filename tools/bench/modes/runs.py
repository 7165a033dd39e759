"""Jobs that differ in mode and seed only, stopped at the success; each finished one is stored and not repeated."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.monitor.timeline import find_updates, read_timeline, update_bound
from megatron_webrl.track import summary
from megatron_webrl.util import atomic_file
from tools.bench.async_modes import CONTESTANTS
from tools.bench.jobs import run_job
from tools.bench.modes.history import RunHistory, smoothed_success, time_to_success, update_records
from tools.bench.monitor.timeline_cost import NO_EVALUATION

CONFIG = Path("configs/quickstart.yaml")
MODES = CONTESTANTS
RUN_SECONDS = 4 * 3600.0  # limit of a job
COMMON = (*NO_EVALUATION, "tracking.timeline=true", "tracking.episodes_gib=0")
QUICK = ("trainer.groups_per_update=2", "trainer.minibatches=1", "rollout.group_size=4", "rollout.groups_in_flight=2")
"""Settings of --quick: enough to see that every part works, nothing more."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """What every job runs until."""

    success: float
    window: int  # updates over which success is smoothed
    updates: int  # limit

    def is_over(self, history: RunHistory) -> bool:
        """Whether a run reached the success, or made all updates."""
        reached = time_to_success(history.updates, self.success, self.window).reached
        return reached or len(history.updates) >= self.updates


@dataclass(frozen=True)
class Bench:
    """The jobs of all modes."""

    folder: Path
    target: Target
    overrides: tuple[str, ...]  # of all jobs
    report: Report  # finished parts
    show: Report  # the state of the running job

    def settings(self, mode: str, seed: int) -> list[str]:
        """The settings of a job that differ from CONFIG."""
        return [*COMMON, *self.overrides, *MODES[mode], f"trainer.updates={self.target.updates}", f"run.seed={seed}"]

    def stored(self, mode: str, seed: int) -> RunHistory | None:
        """The finished run in the folder; None without one, or if it was stopped at a lower success.

        Raises RuntimeError if it had other settings.
        """
        path = self._path(mode, seed)
        if not path.is_file():
            return None
        content = json.loads(path.read_text())
        if content["config"] != resolved(tuple(self.settings(mode, seed))):
            raise RuntimeError(f"{path} is of a run with other settings; name another --folder, or delete it")
        history = RunHistory.from_json(content["history"])
        return history if self.target.is_over(history) else None

    def run(self, mode: str, seed: int) -> RunHistory:
        """Run a job until it reaches the success or has made all updates, and store it. Raises RuntimeError."""
        name, settings = _plain(mode, seed), self.settings(mode, seed)
        began, run = time.time(), self.folder / "runs" / name
        group_size = parse_config(CONFIG, settings).rollout.group_size

        def reached() -> bool:
            # Until the job has renamed it, the folder may hold an interrupted run.
            updates = [update for update in summary.read_updates(run) if update["finished_at"] > began]
            if not updates:
                return False
            records = update_records(updates, group_size)
            rate = smoothed_success(records, self.target.window)[-1]
            success = "-" if rate is None else f"{rate:.0%}"
            self.show(f"{mode}, seed {seed}: update {len(records)} of {self.target.updates}, success {success}, "
                      f"{records[-1].ended:.0f} s")  # fmt: skip
            return time_to_success(records, self.target.success, self.target.window).reached

        run_job(CONFIG, name, settings, self.folder, reached, RUN_SECONDS)
        history = read_run(mode, seed, run)
        self.store(history)
        return history

    def store(self, history: RunHistory) -> None:
        """Keep a finished run. Raises OSError."""
        content = {"config": resolved(tuple(self.settings(history.mode, history.seed))), "history": asdict(history)}
        atomic_file.write_json(self._path(history.mode, history.seed), content, indent=1)

    def _path(self, mode: str, seed: int) -> Path:
        return self.folder / f"{_plain(mode, seed)}.json"


@cache
def resolved(settings: tuple[str, ...]) -> Any:
    """All settings of a job, as JSON holds them. Raises ConfigError."""
    return json.loads(json.dumps(asdict(parse_config(CONFIG, list(settings)))))


def measure(bench: Bench, modes: Sequence[str], seeds: Sequence[int]) -> list[RunHistory]:
    """Run what the folder lacks, seed by seed, so that modes run under similar load. Raises RuntimeError."""
    bench.folder.mkdir(parents=True, exist_ok=True)
    jobs = [(mode, seed) for seed in seeds for mode in modes]
    stored = {job: bench.stored(*job) for job in jobs}  # all checked before the first one runs
    found = []
    for number, (mode, seed) in enumerate(jobs, 1):
        history = stored[mode, seed]
        state = "stored" if history else "ran"
        bench.show(f"{mode}, seed {seed}: starting")
        history = history or bench.run(mode, seed)
        end = time_to_success(history.updates, bench.target.success, bench.target.window)
        outcome = f"{bench.target.success:.0%} after" if end.reached else "not reached:"
        bench.report(f"{number} of {len(jobs)}: {mode}, seed {seed}, {state}: {outcome} {end.updates} updates, "
                     f"{end.seconds:.0f} s")  # fmt: skip
        found.append(history)
    return found


def read_run(mode: str, seed: int, run: Path) -> RunHistory:
    """The history of a finished run from its folder.

    Raises RuntimeError if it made no update, has no timeline, or its accounting does not match.
    """
    accounting, updates = summary.read_summary(run)["accounting"], summary.read_updates(run)
    if accounting is None or not accounting["matches"]:
        raise RuntimeError(f"the accounting of {run} does not match: {accounting}")
    if not updates:
        raise RuntimeError(f"{run} made no update")
    config = parse_config(run / "config.yaml")
    try:
        processes = read_timeline(run)
        spans = find_updates(processes)
    except ConfigError as error:
        raise RuntimeError(f"{run}: {error}") from None
    bounds = {version: update_bound(processes, span) for version, span in spans.items()}
    tokens = accounting["tokens"]
    return RunHistory(
        mode=mode,
        seed=seed,
        updates=update_records(updates, config.rollout.group_size, bounds),
        tokens_trained=tokens["trained"],
        tokens_dropped=tokens["dropped"],
    )


def _plain(mode: str, seed: int) -> str:
    """The name of a job's run."""
    return f"{mode.replace(',', '').replace(' ', '-')}-{seed}"
