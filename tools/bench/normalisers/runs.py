"""Initial policy, pilot and training runs of the experiment, one after another; a finished run is not repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.tasks import PageTasksConfig
from megatron_webrl.track import episodes, summary
from megatron_webrl.track.evaluations import read_evaluations, read_results
from megatron_webrl.util import atomic_file
from tools.bench.jobs import run_job
from tools.bench.normalisers.gates import (
    LAST_UPDATES,
    EpisodeLength,
    Gate,
    UpdateFigures,
    check_gates,
    check_initial_policy,
    mean_steps,
)
from tools.bench.normalisers.verdict import EvaluatedEpisode, RunFigures

CONFIG = Path("configs/normalisers.yaml")
ARMS = ("constant", "per_trajectory", "token_mean")
CONTROL = "tasks.source=miniwob"
"""No page is stuck: there is nothing to lengthen, so no arm should."""
MODEL = Path("runs/models/normalisers")
PRETRAINING_STEPS = 3000
PILOT_SEED, PILOT_UPDATES = 1000, 6
IMITATED = (
    "trainer.warm_start.demonstrations=0", "trainer.warm_start.premature_submit_probability=0",
    "tracking.episodes_gib=0",
)  # fmt: skip
"""Settings of runs that begin with the initial policy."""
QUICK = (
    "trainer.updates=2", "trainer.groups_per_update=2", "rollout.group_size=4", "evaluation.episodes=2",
    "trainer.zero_variance_groups=keep",
)  # fmt: skip
"""Settings of --quick: enough to see that every part works, nothing more. A policy that hardly learned yields no mixed
groups, so those of one outcome are kept."""


@dataclass(frozen=True)
class Run:
    """Figures of one finished run, as the JSON file holds them."""

    arm: str
    seed: int
    control: bool  # with CONTROL
    minutes: float
    first_batch: Sequence[Sequence[EpisodeLength]]
    updates: Sequence[UpdateFigures]
    initial: Sequence[EvaluatedEpisode]  # of the evaluation before training; empty without it
    episodes: Sequence[EvaluatedEpisode]  # of the evaluation after training
    tokens_at_step: Sequence[float]  # mean response tokens of step 1, 2, ... of the last updates' episodes

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Run:
        """The run of which `fields` are the JSON form of asdict(run)."""
        read = dict(fields)
        read["first_batch"] = [[EpisodeLength(**episode) for episode in group] for group in fields["first_batch"]]
        read["updates"] = [UpdateFigures(**update) for update in fields["updates"]]
        for name in ("initial", "episodes"):
            read[name] = [EvaluatedEpisode(**episode) for episode in fields[name]]
        return cls(**read)


@dataclass
class Results:
    """All figures of the experiment."""

    pilot: Run | None = None
    runs: list[Run] = field(default_factory=list)
    quick: bool = False

    @property
    def k(self) -> int:
        """The constant of the arm constant: mean steps of the pilot's first batch. Raises RuntimeError without it."""
        if self.pilot is None:
            raise RuntimeError("there is no pilot yet, which measures k; run with --pilot first, with the same --json")
        return max(1, round(mean_steps(self.pilot.first_batch)))

    @property
    def pilot_gates(self) -> list[Gate]:
        """Those of a run, and of the initial policy; none without a pilot."""
        if self.pilot is None:
            return []
        initial = [EpisodeLength(episode.steps, episode.success) for episode in self.pilot.initial]
        return [*check_initial_policy(initial), *self.gates(self.pilot)]

    def gates(self, run: Run) -> list[Gate]:
        """Those of a run; none of a control, or without a pilot."""
        if self.pilot is None or run.control:
            return []
        return check_gates(run.updates, fmean(update.entropy for update in self.pilot.updates))

    def figures(self, control: bool) -> list[RunFigures]:
        """What a verdict needs of the runs of either kind."""
        return [
            RunFigures(run.arm, run.seed, run.episodes, self.gates(run)) for run in self.runs if run.control is control
        ]

    def has(self, arm: str, seed: int, control: bool) -> bool:
        return any((run.arm, run.seed, run.control) == (arm, seed, control) for run in self.runs)

    @classmethod
    def read(cls, path: Path | None, quick: bool) -> Results:
        """The results in a file; none without one. Raises OSError, and ValueError if the file's `quick` differs."""
        if path is None or not path.exists():
            return cls(quick=quick)
        content = json.loads(path.read_text())
        if content["quick"] != quick:
            raise ValueError(
                f"{path} holds figures of calls with{'' if content['quick'] else 'out'} --quick; name another"
            )
        pilot = Run.from_json(content["pilot"]) if content["pilot"] else None
        return cls(pilot, [Run.from_json(fields) for fields in content["runs"]], quick)

    def write(self, path: Path | None) -> None:
        """Replace the file, which is whole at any time; nothing without a path. Raises OSError."""
        if path is not None:
            machine = {"cpus": os.cpu_count(), "load": os.getloadavg()}
            atomic_file.write_json(path, machine | asdict(self), indent=1)


def make_initial_policy(model: Path, quick: bool, report: Callable[[str], None]) -> None:
    """Let CONFIG's weights imitate demonstrations, unless `model` is there.

    Raises RuntimeError, and ValueError if `model` was made otherwise than CONFIG says now.
    """
    config, records, settings = parse_config(CONFIG), model.with_suffix(".records"), model.with_suffix(".json")
    overrides = ["trainer.warm_start.demonstrations=24"] if quick else []
    steps = 20 if quick else PRETRAINING_STEPS
    wanted = {
        "base": config.model.path, "steps": steps, "overrides": overrides, "source": config.tasks.source,
        "environments": list(cast(PageTasksConfig, config.tasks).environments), **asdict(config.trainer.warm_start),
    }  # fmt: skip
    if settings.is_file() and json.loads(settings.read_text()) != wanted:
        raise ValueError(f"{model} was made with the settings of {settings}, not with today's; remove {model}*")
    if (model / "config.json").is_file():
        return
    settings.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write_json(settings, wanted)
    if not records.is_file():  # it is named once it is complete
        report("recording demonstrations ...")
        _run_module("megatron_webrl", "demonstrate", str(CONFIG), "--out", str(records), *overrides)
    report("imitating them ...")
    _run_module("tools.pretrain_tiny_model", config.model.path, str(records), str(model), f"--steps={steps}")


def _run_module(module: str, *arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    if ended.returncode:
        last = "\n".join(ended.stdout.splitlines()[-15:])
        raise RuntimeError(f"{module} ended with exit code {ended.returncode}:\n{last}")


def run_pilot(model: Path, quick: bool) -> Run:
    """A short run, evaluated before it instead of after, that measures k and the gates. Raises RuntimeError."""
    overrides = [f"trainer.updates={PILOT_UPDATES}", *(QUICK if quick else ())]
    overrides += ["evaluation.before=true", "evaluation.after=false"]
    return train("constant", PILOT_SEED, model, overrides)


def run_arm(arm: str, seed: int, k: int, model: Path, control: bool, quick: bool) -> Run:
    """One run of the protocol, or of its negative control. Raises RuntimeError."""
    overrides = [f"trainer.loss.normalizer_constant={k}"] if arm == "constant" else []
    overrides += QUICK if quick else ()
    overrides += [CONTROL] if control else []
    return train(arm, seed, model, overrides, control)


def train(arm: str, seed: int, model: Path, overrides: Sequence[str], control: bool = False) -> Run:
    """Run the job of CONFIG and read its figures. Raises RuntimeError."""
    fixed = [*IMITATED, f"model.path={model.absolute()}", f"run.seed={seed}", f"trainer.loss.normalizer={arm}"]
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        started = time.monotonic()
        folder = run_job(CONFIG, f"{arm}-{seed}", [*fixed, *overrides], Path(temporary))
        return read_run(arm, seed, control, folder, (time.monotonic() - started) / 60)


def read_run(arm: str, seed: int, control: bool, folder: Path, minutes: float) -> Run:
    """Read the figures of a finished run from its folder."""
    trained = [
        line for line in episodes.read_lines(folder)
        if line["disposition"] == episodes.TRAINED and line["outcome"] in ("success", "failure")
    ]  # fmt: skip
    evaluations = {line["kind"]: line for line in read_evaluations(folder)}
    return Run(
        arm=arm,
        seed=seed,
        control=control,
        minutes=minutes,
        first_batch=_first_batch(trained),
        updates=[_update_figures(update) for update in summary.read_updates(folder)],
        initial=_evaluated(folder, evaluations.get("before")),
        episodes=_evaluated(folder, evaluations.get("after")),
        tokens_at_step=_tokens_at_step(trained),
    )


def _first_batch(trained: Sequence[Mapping[str, Any]]) -> list[list[EpisodeLength]]:
    first = min((line["version"] for line in trained), default=None)
    groups: dict[int, list[EpisodeLength]] = defaultdict(list)
    for line in trained:
        if line["version"] == first:
            groups[line["ticket"]].append(EpisodeLength(len(line["steps"]), line["outcome"] == "success"))
    return list(groups.values())


def _tokens_at_step(trained: Sequence[Mapping[str, Any]]) -> list[float]:
    last = max((line["version"] for line in trained), default=0)
    tokens: dict[int, list[int]] = defaultdict(list)
    for line in trained:
        if line["version"] > last - LAST_UPDATES:
            for number, step in enumerate(line["steps"]):
                tokens[number].append(step["response_tokens"])
    return [fmean(tokens[number]) for number in sorted(tokens)]


def _update_figures(update: Mapping[str, Any]) -> UpdateFigures:
    extra = update["extra"]
    return UpdateFigures(
        entropy=extra["entropy"],
        format_error_rate=extra["format_error_rate"],
        gradient_clipped=extra["gradient_clipped"],
        success=extra.get("rollout_success_rate"),
        steps_failure=extra.get("steps_mean/failure"),
    )


def _evaluated(folder: Path, line: dict[str, Any] | None) -> list[EvaluatedEpisode]:
    results: Iterable[Any] = read_results(folder, line) if line else ()
    return [
        EvaluatedEpisode(result.index, result.outcome == "success", result.steps, result.response_tokens)
        for result in results
        if result.has_verdict
    ]
