"""Discrete-event simulation of rollout and trainer: trajectories per hour, staleness and waiting times.

    python -m tools.simulate_cluster check RUN... [--from RUN] [--tolerance 0.15] [--seeds 20] [--json FILE]
    python -m tools.simulate_cluster predict [--nodes 8 32] [--config FILE] [--card H100] [--inputs FILE]
                                             [--set NAME=VALUE ...] [--quick] [--json FILE] [--plot FILE]
                                             [--write docs/scaling.md]

check: simulates a run with its own settings and measured times, and compares the figures with those of the run; exit
code 1 if a figure differs by more than the tolerance. --from takes the times from another run, for example of another
mode.

predict: simulates clusters that were never measured, from the inputs in docs/scaling.md: every split of each node's
GPUs between engines and trainer, and all modes. --config takes the speed of engines and trainer from the cost model of
`webrl placement --time` instead.
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

from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.hardware import CARDS
from tools.arguments import bounded_number, write_json
from tools.cluster import inputs, measured, predicted, report

FIGURE_LABELS = {
    "per_hour": "trajectories/h",
    "staleness": "staleness, versions",
    "waiting": "trainer waits",
    "updates_per_hour": "updates/h",
}


def check(options: argparse.Namespace, console: Console) -> int:
    """Compare runs with their simulations; exit code 1 if a figure differs. Raises ValueError or OSError."""
    found: list[dict[str, Any]] = []
    agree = True
    source = measured.read_run(options.source) if options.source else None
    for folder in options.runs:
        run = measured.read_run(folder)
        if source is not None:
            run = measured.with_times_from(run, source)
        rows, results = measured.compare_with_simulation(run, options.seeds, options.tolerance)
        agree &= all(row.agrees for row in rows)
        console.print(_comparison(run, rows))
        console.print(
            f"{len(run.workload.groups)} groups, {options.seeds} simulated runs of {run.settings.updates} updates; "
            f"serial fraction of the engine {run.settings.serial:g}, its speed while the trainer trains "
            f"{run.settings.overlap:g}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        found.append(
            {
                "run": str(folder),
                "from": str(options.source or folder),
                "settings": asdict(run.settings),
                "figures": [asdict(row) | {"ratio": row.ratio} for row in rows],
                "simulated": [asdict(result) for result in results],
            }
        )
    little = ", ".join(f"{FIGURE_LABELS[name]} {value:g}" for name, value in measured.ABSOLUTE_TOLERANCE.items())
    verdict = "all agree" if agree else "not all agree"
    console.print(
        f"{verdict}: within {options.tolerance:.0%}, or by less than {little}", highlight=False, soft_wrap=True
    )
    write_json(options.json, {"tolerance": options.tolerance, "runs": found})
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


def predict(options: argparse.Namespace, console: Console) -> int:
    """Simulate clusters. Raises ValueError or OSError."""
    if options.card and not options.config:
        raise ValueError("--card names the GPUs of --config; add --config")
    given = inputs.SimulationInputs()
    if options.config:
        given = inputs.from_cost_model(given, parse_config(options.config, []), CARDS[options.card or "H100"])
    values = inputs.load(options.inputs, options.set, given)
    page = options.write.read_text() if options.write else None
    amount = predicted.QUICK if options.quick else predicted.FULL
    changes = () if options.quick else report.INPUT_VARIANTS
    found = report.make_report(values, options.nodes, changes, amount, options.seed, console.print)
    for title, columns, rows in report.tables(found):
        table = Table(title=title.replace("`", ""), title_justify="left")
        for number, column in enumerate(columns):
            table.add_column(column, justify="left" if number == 0 else "right")
        for row in rows:
            table.add_row(*(text.replace("**", "").replace("`", "") + " <-" * ("**" in text) for text in row))
        console.print(table)
    console.print(report.recommendation(found), highlight=False, soft_wrap=True)
    console.print("Predicted from the inputs, not measured: docs/scaling.md", highlight=False)
    if page is not None:
        options.write.write_text(report.update_page(page, found))
    if options.plot:
        options.plot.write_text(report.draw(found))
    write_json(options.json, report.figures(found))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser("check", help="compare measured runs with their simulation")
    one.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    one.add_argument("--from", dest="source", type=Path, metavar="RUN", help="take the times from this run")
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
    other = commands.add_parser("predict", help="predict clusters")
    other.add_argument(
        "--nodes", nargs="+", type=bounded_number(int, 1), default=[8, 32], metavar="N", help="sizes (default: 8 32)"
    )
    other.add_argument("--config", metavar="FILE", help="configuration whose speed the cost model predicts")
    other.add_argument("--card", choices=tuple(CARDS), help="with --config: the GPU (default: H100)")
    other.add_argument("--inputs", type=Path, metavar="FILE", help="YAML: inputs by name")
    other.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="changed inputs")
    other.add_argument("--seed", type=bounded_number(int, 0), default=0, metavar="N", help="(default: 0)")
    other.add_argument(
        "--quick", action="store_true", help="few updates, no table of changed inputs; figures mean little"
    )
    other.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures as SVG")
    other.add_argument(
        "--write", type=Path, metavar="FILE", help="write the tables into this page, between its markers"
    )
    other.set_defaults(command=predict)
    for each in (one, other):
        each.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 for an input that cannot be read or simulated, or a file that cannot be written."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options, Console(width=None if sys.stdout.isatty() else 160)))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"simulate_cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
