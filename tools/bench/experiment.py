"""Run the arms of an experiment, whole jobs that differ in a few settings, and print what they reached.

    python -m tools.bench.experiment controls --seeds 0 1 2 --folder runs/controls --json controls.json
    python -m tools.bench.experiment ablations --list

An experiment is a file of tools/bench/experiments, or one of your own: the job, its arms, the columns of the table.
Every run is `webrl train`; runs take turns seed by seed, so that all arms run under similar load. FOLDER keeps the
finished runs and does not repeat them, so that an interrupted call can be given again. Exit code 1: a run failed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.child_process import die_with_parent
from megatron_webrl.track import summary
from megatron_webrl.util import atomic_file
from tools.arguments import bounded_number, make_bench_parser, write_json
from tools.bench.experiment_figures import (
    Run,
    Target,
    arm_figures,
    compare_arms,
    draw,
    has_reached,
    read_run,
    reported_columns,
    show,
)
from tools.bench.jobs import run_job

EXPERIMENTS = Path(__file__).with_name("experiments")
RUN_SECONDS = 4 * 3600.0
PREPARE_SECONDS = 2 * 3600.0
COMMON = ("tracking.episodes_gib=0",)
BEFORE = "before"  # the arm that evaluates the initial weights


@dataclass(frozen=True)
class Arm:
    """Settings that differ from those of the arm `base`."""

    settings: Sequence[str] = ()
    base: str = ""
    metric: str = ""  # of an update: says how much the option of this arm acts
    quick: Sequence[str] = ()  # settings of --quick, after all others


@dataclass(frozen=True)
class Preparation:
    """A command that runs once in FOLDER, unless what it creates is there."""

    creates: str
    command: str
    quick: str = ""  # more arguments with --quick


@dataclass(frozen=True)
class Experiment:
    """A file of EXPERIMENTS. {folder} stands for the folder of the runs."""

    config: str | Mapping[str, Any]  # of all jobs: a file, or its content
    arms: Mapping[str, Arm]
    columns: Sequence[str]
    settings: Sequence[str] = ()  # of all jobs
    quick: Sequence[str] = ()  # of all jobs with --quick
    seeds: Sequence[int] = (0,)
    before: Sequence[str] = ()  # of a run that evaluates the initial weights of a seed, for all arms
    prepare: Sequence[Preparation] = ()
    target: Target = field(default_factory=Target)
    compare: str = ""  # the arm that the others are compared with
    compared: Sequence[str] = ()  # columns

    @classmethod
    def load(cls, name: str) -> Experiment:
        """The experiment of a name or a file. Raises OSError, and ValueError for an unknown field or arm."""
        path = EXPERIMENTS / f"{name}.yaml"
        content = yaml.safe_load((path if path.is_file() else Path(name)).read_text())
        try:
            content["arms"] = {arm: Arm(**(fields or {})) for arm, fields in content["arms"].items()}
            content["prepare"] = [Preparation(**fields) for fields in content.get("prepare", ())]
            content["target"] = Target(**content.get("target", {}))
            made = cls(**content)
        except TypeError as error:
            raise ValueError(f"{name}: {error}") from None
        for arm in made.arms.values():
            if arm.base and arm.base not in made.arms:
                raise ValueError(f"{name}: no arm {arm.base}")
        return made

    def arm_settings(self, name: str) -> list[str]:
        """The settings of an arm, those of its base first."""
        if name == BEFORE and name not in self.arms:
            return list(self.before)
        arm = self.arms[name]
        return [*(self.arm_settings(arm.base) if arm.base else ()), *arm.settings]


@dataclass(frozen=True)
class Jobs:
    """The jobs of an experiment in a folder."""

    experiment: Experiment
    folder: Path
    changed: Sequence[str]  # settings of all jobs, of the command line
    quick: bool
    console: Console

    @property
    def config(self) -> Path:
        """The configuration file of all jobs, written if the experiment has its content."""
        config = self.experiment.config
        if isinstance(config, str):
            return Path(config)
        path = self.folder / "config.yaml"
        path.write_text(self._in_folder(yaml.safe_dump(config)))
        return path

    def settings(self, arm: str, seed: int) -> list[str]:
        """The settings of a job that differ from `config`; later ones win."""
        experiment, own = self.experiment, self.experiment.arm_settings(arm)
        words = [*COMMON, *experiment.settings, *(experiment.quick if self.quick else ()), *self.changed, *own]
        if self.quick and arm in experiment.arms:
            words += experiment.arms[arm].quick
        return [*map(self._in_folder, words), f"run.seed={seed}"]

    def prepare(self) -> None:
        """Run the preparations that are due. Raises RuntimeError."""
        for each in self.experiment.prepare:
            if Path(self._in_folder(each.creates)).exists():
                continue
            command = f"{each.command} {each.quick if self.quick else ''}"
            words = shlex.split(self._in_folder(command.replace("{config}", str(self.config))))
            self.console.print(shlex.join(words), soft_wrap=True, highlight=False, markup=False)
            words = [sys.executable, *words[1:]] if words[0] == "python" else words
            done = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PREPARE_SECONDS,
                check=False, preexec_fn=partial(die_with_parent, signal.SIGTERM, os.getpid()),
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"exit code {done.returncode}:\n" + "\n".join(done.stdout.splitlines()[-15:]))

    def run(self, arm: str, seed: int) -> Run:
        """The figures of a run; a finished one is not repeated.

        Raises RuntimeError if the job fails, or if the folder holds a run with other settings.
        """
        name, settings = f"{arm}-{seed}", self.settings(arm, seed)
        target, note = self.experiment.target, self.folder / f"{arm}-{seed}.finished"
        state = yaml.safe_dump({"settings": settings, "target": asdict(target)})
        folder = self.folder / "runs" / name
        metric = self.experiment.arms[arm].metric if arm in self.experiment.arms else ""
        if not note.is_file():
            self.console.print(f"{arm}, seed {seed}; log: {self.folder / name}.log", highlight=False, soft_wrap=True)
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted call
            began = time.time()

            def should_stop() -> bool:
                updates = [update for update in summary.read_updates(folder) if update["finished_at"] > began]
                return has_reached(updates, target)

            run_job(self.config, name, settings, self.folder, should_stop, RUN_SECONDS)
            atomic_file.write_text(note, state)
        elif note.read_text() != state:
            raise RuntimeError(f"{note} is of a run with other settings; name another --folder, or delete it")
        return read_run(arm, seed, folder, target, metric, self.experiment.columns)

    def _in_folder(self, text: str) -> str:
        return text.replace("{folder}", str(self.folder))


def measure(jobs: Jobs, arms: Sequence[str], seeds: Sequence[int]) -> tuple[list[Run], int]:
    """The finished runs, and 1 if a run failed, 130 if the user interrupted. Raises RuntimeError for a preparation."""
    runs, code = [], 0
    wanted = [(arm, seed) for seed in seeds for arm in ((BEFORE,) if jobs.experiment.before else ()) + tuple(arms)]
    try:
        jobs.prepare()
        for number, (arm, seed) in enumerate(wanted, 1):
            jobs.console.print(f"{number} of {len(wanted)}: {arm}, seed {seed}", highlight=False)
            try:
                runs.append(jobs.run(arm, seed))
            except RuntimeError as error:
                jobs.console.print(f"  failed: {error}", markup=False, highlight=False, soft_wrap=True)
                code = 1
    except KeyboardInterrupt:
        jobs.console.print("interrupted; the finished runs:", highlight=False)
        code = 130
    return runs, code


def list_arms(experiment: Experiment, console: Console) -> None:
    """Print all arms with their settings."""
    table = Table()
    for column in ("arm", "compared with", "settings that differ"):
        table.add_column(column)
    for name, arm in experiment.arms.items():
        table.add_row(name, arm.base, escape("\n".join(arm.settings)) or "none")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = make_bench_parser(__doc__, "one seed of small jobs, to check the parts; figures mean nothing")
    parser.add_argument("experiment", metavar="EXPERIMENT", help=", ".join(names()) + ", or a file")
    parser.add_argument("--arms", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=bounded_number(int, 0), nargs="+", metavar="N", help="one run of each arm each")
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="settings of all jobs")
    parser.add_argument("--success", type=bounded_number(float, 0), metavar="SHARE", help="end a run once it is there")
    parser.add_argument("--window", type=bounded_number(int, 1), metavar="N", help="updates of a mean success")
    parser.add_argument("--folder", type=Path, help="keep the runs there, and do not repeat finished ones")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the success of sampled episodes as SVG")
    parser.add_argument("--list", action="store_true", help="show the arms, and stop")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 180)
    try:
        experiment = Experiment.load(options.experiment)
        target = {"success": options.success, "window": options.window}
        given = {name: value for name, value in target.items() if value is not None}
        experiment = replace(experiment, target=replace(experiment.target, **given))
        if unknown := set(options.arms or ()) - experiment.arms.keys():
            parser.error(f"--arms: {options.experiment} has no {', '.join(sorted(unknown))}")
        if options.list:
            list_arms(experiment, console)
            return 0
        with _open_folder(options.folder) as folder:
            jobs = Jobs(experiment, Path(folder).absolute(), options.set, options.quick, console)
            seeds = options.seeds or experiment.seeds
            runs, code = measure(jobs, options.arms or list(experiment.arms), seeds[:1] if options.quick else seeds)
    except (RuntimeError, OSError, ValueError, ConfigError) as error:
        sys.exit(f"bench.experiment: {error}")
    columns = reported_columns(runs, list(experiment.arms), experiment.columns)
    arms = [arm for arm in experiment.arms if any(run.arm == arm for run in runs)]
    show(runs, arms, columns, {name: arm.metric for name, arm in experiment.arms.items()}, console)
    compared = compare_arms(runs, arms, experiment.compare, reported_columns(runs, arms, experiment.compared), console)
    if options.plots:
        options.plots.write_text(draw(runs, Path(options.experiment).stem))
    figures = {
        arm: {column: asdict(found) for column in columns if (found := arm_figures(runs, arm, column))} for arm in arms
    }
    machine = {"cpus": os.cpu_count(), "load": os.getloadavg(), "quick": options.quick, "settings": options.set}
    write_json(options.json, machine | {"arms": figures, "compared": compared, "runs": [*map(asdict, runs)]})
    return code


def names() -> list[str]:
    """The experiments of this folder."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.yaml"))


def _open_folder(folder: Path | None) -> AbstractContextManager[str | Path]:
    if folder is None:
        return tempfile.TemporaryDirectory(prefix="webrl-bench-")
    folder.mkdir(parents=True, exist_ok=True)
    return nullcontext(folder)


if __name__ == "__main__":
    sys.exit(main())
