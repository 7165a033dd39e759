"""Check what the quickstart's policy learns from: its job in arms that differ from it in a few settings.

    python -m tools.bench.learning --seeds 0 1 2 --folder FOLDER       controls: rewards, shuffled, imitation
    python -m tools.bench.learning --arms ablations --folder FOLDER    one option of the algorithm each
    python -m tools.bench.learning --list                              the arms, and options without one
    python -m tools.bench.learning --arms --folder FOLDER              show the runs of earlier calls

Every arm is `webrl train configs/quickstart.yaml`, evaluated at temperature 1, with blank images, and greedily. The
weights that all arms start from are evaluated once for each seed. FOLDER keeps the runs; a finished one is not
repeated, so that an interrupted call can be given again. Exit code 1: a run failed; 130: interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.config.setting import ConfigError
from tools.arguments import bounded_number, make_bench_parser, write_json
from tools.bench.bootstrap import Interval
from tools.bench.learning.arms import ARMS, INITIAL, SETS, WITHOUT_ARM, overrides
from tools.bench.learning.figures import LOSS, ArmFigures, arm_figures
from tools.bench.learning.plot import draw
from tools.bench.learning.runs import RunFiles, changed_settings, run_arm

COLUMNS = (
    "arm", "seeds", "before", "after, 95 %", "gain", "blind\ngain", "needs the\nscreenshot", "greedy\nafter",
    f"lost over\n{100 * LOSS:.0f} points", "metric", "min-\nutes",
)  # fmt: skip


def measure(
    files: RunFiles,
    arms: Sequence[str],
    seeds: Sequence[int],
    quick: bool,
    json: Path | None,
    console: Console,
    updates: int | None = None,
) -> bool:
    """Run what `files` lacks, one after another; returns whether all succeeded. An arm that fails is reported.

    Raises RuntimeError if the initial weights cannot be evaluated or a file has other settings; OSError, ConfigError.
    """
    wanted = [(arm, seed) for seed in seeds for arm in ((INITIAL, *arms) if arms else ())]
    due = [
        (arm, seed)
        for arm, seed in wanted
        if files.find(arm, seed, changed_settings(overrides(arm, seed, quick, updates))) is None
    ]
    if len(due) < len(wanted):
        console.print(f"{len(wanted) - len(due)} of {len(wanted)} runs are finished", highlight=False)
    succeeded, started = True, time.monotonic()
    for number, (arm, seed) in enumerate(due):
        log = files.folder / f"{arm}-{seed}.log"
        console.print(f"{number + 1} of {len(due)}: {arm}, seed {seed}; log: {log}", highlight=False, soft_wrap=True)
        try:
            run = run_arm(arm, seed, quick, files.folder, updates)
        except RuntimeError as error:
            if arm == INITIAL:
                raise
            console.print(f"  failed: {error}", markup=False, highlight=False, soft_wrap=True)
            succeeded = False
            continue
        files.write(run)
        write_figures(files, json)
        _show_progress(files, arm, (time.monotonic() - started) / (number + 1) * (len(due) - number - 1), console)
    return succeeded


def _show_progress(files: RunFiles, arm: str, seconds_left: float, console: Console) -> None:
    """Print the arm's success over its finished runs, and the time that those still to run will take."""
    runs = [run for run in files.read_all() if run.arm in (arm, INITIAL)]
    result = "".join(
        f"{each.arm}: {_percent(each.success['before'])} -> {_percent(each.success['after'])}, needs the screenshot "
        f"{_points(each.success['seeing_gain'])}; "
        for each in arm_figures(runs)
        if each.arm == arm
    )
    console.print(f"  {result}about {seconds_left / 60:.0f} minutes left", highlight=False, soft_wrap=True)


def show(figures: Sequence[ArmFigures], console: Console) -> None:
    """Print the table."""
    title = "Success on held-out tasks, sampled at temperature 1"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number in (0, 8, 9) else "right", overflow="fold")
    for each in figures:
        table.add_row(*cells(each))
    console.print(table)
    console.print(
        "gain, and gain that needs the screenshot (the gain less that with blank images), in points; intervals: "
        "bootstrap over seeds, then tasks, with one seed over tasks alone; metric: of the arm, mean over updates; "
        "minutes: of the whole job, without the evaluation of the initial weights",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def cells(figures: ArmFigures) -> list[str]:
    """A row of the table."""
    success, metric = figures.success, ARMS[figures.arm].metric
    lost = ", ".join(f"{name} {100 * change:.0f}" for name, change in figures.lost.items())
    return [
        figures.arm, " ".join(map(str, figures.seeds)), _percent(success["before"]),
        _with_interval(success["after"], ".1f"), _with_interval(success["gain"], "+.1f"),
        _points(success["blind_gain"]), _with_interval(success["seeing_gain"], "+.1f"),
        _percent(success["greedy_after"]), lost or ("-" if success["gain"] is None else "none"),
        "" if figures.metric is None else f"{metric} {figures.metric:.3g}", f"{figures.minutes:.1f}",
    ]  # fmt: skip


def list_arms(console: Console) -> None:
    """Print all arms with their settings, and the options without one."""
    table = Table(title="Arms", title_justify="left")
    for column in ("arm", "compared with", "settings that differ"):
        table.add_column(column)
    for name, arm in ARMS.items():
        inherited = ARMS[arm.base].settings if arm.base else ()
        own = [setting for setting in arm.settings if setting not in inherited]
        table.add_row(name, arm.base, "\n".join(own) or "none: configs/quickstart.yaml")
    console.print(table)
    table = Table(title="Options without an arm", title_justify="left")
    for column in ("option", "reason"):
        table.add_column(column)
    for option, reason in WITHOUT_ARM.items():
        table.add_row(option, reason)
    console.print(table)
    console.print(*(f"{name}: {', '.join(arms)}" for name, arms in SETS.items()), sep="\n", highlight=False)


def expand(names: Sequence[str]) -> list[str]:
    """Arms in the given order, each once; a name of SETS stands for its arms."""
    return list(dict.fromkeys(arm for name in names for arm in SETS.get(name, (name,))))


def write_figures(files: RunFiles, path: Path | None) -> None:
    """Write the figures of all arms and runs to a file; nothing without a path. Raises OSError."""
    if path is None:
        return
    runs = files.read_all()
    write_json(
        path,
        {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "arms": [asdict(each) for each in arm_figures(runs)],
            "runs": [asdict(each) for each in runs],
        },
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = make_bench_parser(__doc__, "two updates and a few tasks, to check the parts; figures mean nothing")
    parser.add_argument(
        "--arms", nargs="*", choices=(*SETS, *ARMS), default=["controls"], metavar="NAME",
        help=f"arms, see --list, or {', '.join(SETS)} (default: controls)",
    )  # fmt: skip
    parser.add_argument(
        "--seeds", type=bounded_number(int, 0), nargs="+", default=[0], metavar="N", help="one run of each arm per seed"
    )
    parser.add_argument(
        "--updates", type=bounded_number(int, 1), metavar="N", help="of arms with rewards (default: the quickstart's)"
    )
    parser.add_argument("--folder", type=Path, help="keep the runs there, and do not repeat finished ones")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the curves as SVG")
    parser.add_argument("--list", action="store_true", help="show the arms, and the options without one, and stop")
    options = parser.parse_args(arguments)
    if options.quick and options.updates is not None:
        parser.error("--quick sets --updates")
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        list_arms(console)
        return 0
    code = 0
    try:
        with _open_folder(options.folder) as folder:
            files = RunFiles(Path(folder))
            arms = expand(options.arms)
            try:
                code = int(
                    not measure(
                        files, arms, options.seeds, options.quick, options.json, console, updates=options.updates
                    )
                )
            except KeyboardInterrupt:
                console.print("interrupted; the finished runs:", highlight=False)
                code = 130
            runs = files.read_all()
            show(arm_figures(runs), console)
            write_figures(files, options.json)
            if options.plots:
                options.plots.write_text(draw(runs))
    except (RuntimeError, OSError, ConfigError) as error:
        sys.exit(f"bench.learning: {error}")
    return code


def _open_folder(folder: Path | None) -> AbstractContextManager[str | Path]:
    if folder is None:
        return tempfile.TemporaryDirectory(prefix="webrl-bench-")
    folder.mkdir(parents=True, exist_ok=True)
    return nullcontext(folder)


def _percent(interval: Interval | None) -> str:
    return "-" if interval is None else f"{interval.value:.1%}"


def _points(interval: Interval | None) -> str:
    return "-" if interval is None else f"{100 * interval.value:+.1f}"


def _with_interval(interval: Interval | None, form: str) -> str:
    """In percent or points; `form` of a number, with + for points."""
    if interval is None:
        return "-"
    ends = form.removeprefix("+")
    return f"{100 * interval.value:{form}} ({100 * interval.low:{ends}} to {100 * interval.high:{ends}})"


if __name__ == "__main__":
    sys.exit(main())
