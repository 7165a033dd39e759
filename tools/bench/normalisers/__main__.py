"""Test AsyncWebRL's claim about loss normalisers: a constant instead of 1/|tau| shortens trajectories at equal success.

    python -m tools.bench.normalisers --pilot --json FILE       initial policy, k, gates
    python -m tools.bench.normalisers --json FILE [--arms NAME ...] [--seeds N ...] [--control] [--plots FILE]

FILE holds all figures. It is written after every run, and a run that it holds is not repeated, so an interrupted call
can be given again. docs/learning.md describes protocol, gates and criteria. Exit code 1: with --pilot, a gate failed.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from tools.arguments import make_bench_parser
from tools.bench.bootstrap import Interval
from tools.bench.normalisers.gates import Gate
from tools.bench.normalisers.plot import draw
from tools.bench.normalisers.runs import (
    ARMS,
    MODEL,
    PILOT_SEED,
    Results,
    Run,
    make_initial_policy,
    run_arm,
    run_pilot,
)
from tools.bench.normalisers.verdict import SEEDS, bootstrap, decide, paired_tables


def measure(
    results: Results, path: Path | None, arms: Sequence[str], seeds: Sequence[int], console: Console,
    *, pilot: bool, control: bool,
) -> None:  # fmt: skip
    """Run what `results` lacks, and write the file after each run. Raises RuntimeError, OSError."""
    quick = results.quick
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as temporary:
        model = Path(temporary) / "model" if quick else MODEL
        pilot_is_due = (pilot or quick) and results.pilot is None
        due = [(seed, arm) for seed in seeds for arm in arms if not results.has(arm, seed, control)]
        if pilot_is_due or (due and not pilot):
            make_initial_policy(model, quick, console.print)
        if pilot_is_due:
            console.print(f"pilot, seed {PILOT_SEED} ...")
            results.pilot = run_pilot(model, quick)
            results.write(path)
        if pilot:
            return
        for seed, arm in due:
            console.print(f"{arm}, seed {seed}{', no page stuck' if control else ''} ...")
            results.runs.append(run_arm(arm, seed, results.k, model, control, quick))
            results.write(path)


def show(results: Results, console: Console) -> None:
    """Print pilot, runs and verdict."""
    if results.pilot is not None:
        console.print(f"pilot: k = {results.k}")
        show_gates(results.pilot_gates, console)
    if not results.runs:
        return
    table = Table(title="After training, at temperature 1", title_justify="left")
    for column in ("pages", "arm", "seed", "success", "tokens", "steps: success / failure", "gates", "minutes"):
        table.add_column(column, justify="left" if column in ("pages", "arm") else "right")
    for run in results.runs:
        table.add_row(*_cells(run, results.gates(run)))
    console.print(table)
    if main_runs := results.figures(control=False):
        verdict = decide(main_runs)
        console.print(f"[bold]{verdict.kind}[/bold]", *(f"- {reason}" for reason in verdict.reasons), sep="\n")
        _show_differences("constant less per_trajectory", verdict.tokens, verdict.success, console)
    if tables := list(paired_tables(results.figures(control=True)).values()):
        _show_differences("negative control, constant less per_trajectory", *bootstrap(tables), console)


def show_gates(gates: Sequence[Gate], console: Console) -> None:
    """Print a table of gates."""
    table = Table()
    for column in ("gate", "value", "condition", "holds"):
        table.add_column(column)
    for gate in gates:
        value = "-" if gate.value is None else f"{gate.value:.2f}"
        table.add_row(gate.name, value, gate.condition, "yes" if gate.passed else "no")
    console.print(table)


def _cells(run: Run, gates: Sequence[Gate]) -> list[str]:
    lengths = [[episode.steps for episode in run.episodes if episode.success is kind] for kind in (True, False)]
    steps = " / ".join(f"{fmean(each):.1f}" if each else "-" for each in lengths)
    success = fmean(episode.success for episode in run.episodes) if run.episodes else None
    tokens = fmean(episode.tokens for episode in run.episodes) if run.episodes else None
    return [
        "none stuck" if run.control else "", run.arm, str(run.seed), "-" if success is None else f"{success:.0%}",
        "-" if tokens is None else f"{tokens:.0f}", steps,
        "-" if run.control else "hold" if all(gate.passed for gate in gates) else "fail", f"{run.minutes:.1f}",
    ]  # fmt: skip


def _show_differences(title: str, tokens: Interval | None, success: Interval | None, console: Console) -> None:
    if tokens is None or success is None:
        return
    console.print(
        f"{title}: tokens per episode {tokens.value:+.0%} ({tokens.low:+.0%} to {tokens.high:+.0%}), "
        f"success {100 * success.value:+.1f} points ({100 * success.low:+.1f} to {100 * success.high:+.1f})"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = make_bench_parser(__doc__, "a pilot, two arms and one seed with an untrained policy, to check the parts")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS[:2], metavar="NAME", help=", ".join(ARMS))
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(range(SEEDS)), metavar="N", help="one run of each arm each"
    )
    parser.add_argument("--pilot", action="store_true", help="make the initial policy, measure k and the gates, stop")
    parser.add_argument("--control", action="store_true", help="run the arms without stuck pages: negative control")
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the curves as SVG")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        results = Results.read(options.json, options.quick)
        measure(
            results, options.json, options.arms, [0] if options.quick else options.seeds, console,
            pilot=options.pilot, control=options.control,
        )  # fmt: skip
    except (RuntimeError, OSError, ValueError) as error:
        sys.exit(f"bench.normalisers: {error}")
    show(results, console)
    if options.plots:
        options.plots.write_text(draw(results.runs))
    return int(options.pilot and not options.quick and not all(gate.passed for gate in results.pilot_gates))


if __name__ == "__main__":
    sys.exit(main())
