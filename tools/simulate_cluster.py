"""Simulate rollout and trainer, event by event: how many trajectories an hour, how stale, and who waits?

    python -m tools.simulate_cluster check RUN... [--from RUN] [--tolerance 0.15] [--seeds 20] [--json FILE]
    python -m tools.simulate_cluster predict [--nodes 8 32] [--inputs FILE] [--set NAME=VALUE ...] [--quick]
                                             [--json FILE] [--plot FILE] [--write docs/scaling.md]

check: feeds the simulation with the times that a run measured, and with its settings, and compares its figures with
the run's; exits with 1 where one is further off than the tolerance. With --from the times are those of another run,
of another mode for instance.

predict: clusters that nobody has measured, from inputs that docs/scaling.md lists with their sources: every split of
each node's GPUs between engines and trainer, and the modes against each other.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python tools/simulate_cluster.py`

from tools.arguments import bounded_number, write_json
from tools.cluster import inputs, measured, predicted, report

FIGURE_LABELS = {
    "per_hour": "trajectories/h",
    "staleness": "staleness, versions",
    "waiting": "trainer waits",
    "updates_per_hour": "updates/h",
}


def check(given: argparse.Namespace, console: Console) -> int:
    """Compare runs with simulations of them; 1 if a figure is off. Raises ValueError or OSError."""
    found: list[dict[str, Any]] = []
    agree = True
    source = measured.read_run(given.source) if given.source else None
    for folder in given.runs:
        run = measured.read_run(folder)
        if source is not None:
            run = measured.with_times_from(run, source)
        rows, results = measured.compare_with_simulation(run, given.seeds, given.tolerance)
        agree &= all(row.agrees for row in rows)
        console.print(_comparison(run, rows))
        console.print(
            f"{len(run.workload.groups)} groups, {given.seeds} simulated runs of {run.settings.updates} updates; "
            f"serial share of the engine {run.settings.serial:g}, its speed while the trainer trains "
            f"{run.settings.overlap:g}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        found.append(
            {
                "run": str(folder),
                "from": str(given.source or folder),
                "settings": asdict(run.settings),
                "figures": [asdict(row) | {"ratio": row.ratio} for row in rows],
                "simulated": [asdict(result) for result in results],
            }
        )
    little = ", ".join(f"{FIGURE_LABELS[name]} {value:g}" for name, value in measured.ABSOLUTE_TOLERANCE.items())
    verdict = "all agree" if agree else "not all agree"
    console.print(f"{verdict}: within {given.tolerance:.0%}, or by less than {little}", highlight=False, soft_wrap=True)
    write_json(given.json, {"tolerance": given.tolerance, "runs": found})
    return 0 if agree else 1


def _comparison(run: measured.MeasuredRun, rows: list[measured.FigureComparison]) -> Table:
    settings = run.settings
    table = Table(title=f"{run.name}: {settings.mode}, {settings.stepping}", title_justify="left")
    for column in ("", "measured", "simulated", "spread", "ratio", "agrees"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        ratio, agrees = "" if row.ratio is None else f"{row.ratio:.2f}", "yes" if row.agrees else "NO"
        spread = f"{row.spread:.2g}"
        table.add_row(FIGURE_LABELS[row.name], f"{row.measured:.4g}", f"{row.simulated:.4g}", spread, ratio, agrees)
    return table


def predict(given: argparse.Namespace, console: Console) -> int:
    """Simulate clusters. Raises ValueError or OSError."""
    values = inputs.load(given.inputs, given.set)
    page = given.write.read_text() if given.write else None
    amount = predicted.QUICK if given.quick else predicted.FULL
    changes = () if given.quick else report.INPUT_VARIANTS
    found = report.make_report(values, given.nodes, changes, amount, given.seed, console.print)
    for title, columns, rows in report.tables(found):
        table = Table(title=title.replace("`", ""), title_justify="left")
        for place, column in enumerate(columns):
            table.add_column(column, justify="left" if place == 0 else "right")
        for row in rows:
            table.add_row(*(text.replace("**", "").replace("`", "") + " <-" * ("**" in text) for text in row))
        console.print(table)
    console.print(report.recommendation(found), highlight=False, soft_wrap=True)
    console.print("Predicted from the inputs, not measured: docs/scaling.md", highlight=False)
    if page is not None:
        given.write.write_text(report.update_page(page, found))
    if given.plot:
        given.plot.write_text(report.draw(found))
    write_json(given.json, report.figures(found))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("check", help="simulate measured runs")
    one.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    one.add_argument("--from", dest="source", type=Path, metavar="RUN", help="the run whose times are used")
    one.add_argument(
        "--tolerance",
        type=bounded_number(float, 0, exclusive=True),
        default=0.15,
        metavar="SHARE",
        help="(default: 0.15)",
    )
    one.add_argument(
        "--seeds", type=bounded_number(int, 1), default=20, metavar="N", help="simulated runs (default: 20)"
    )
    one.set_defaults(command=check)
    other = commands.add_parser("predict", help="simulate clusters")
    other.add_argument(
        "--nodes", nargs="+", type=bounded_number(int, 1), default=[8, 32], metavar="N", help="sizes (default: 8 32)"
    )
    other.add_argument("--inputs", type=Path, metavar="FILE", help="YAML: inputs by name")
    other.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="inputs that differ")
    other.add_argument("--seed", type=bounded_number(int, 0), default=0, metavar="N", help="(default: 0)")
    other.add_argument("--quick", action="store_true", help="few updates and no changed inputs; figures mean little")
    other.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as an SVG")
    other.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this page, between its marks")
    other.set_defaults(command=predict)
    for each in (one, other):
        each.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Simulate; 2 for what cannot be read, simulated or written."""
    given = make_parser().parse_args(arguments)
    try:
        return int(given.command(given, Console(width=None if sys.stdout.isatty() else 160)))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"simulate_cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
