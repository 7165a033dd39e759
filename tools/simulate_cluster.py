"""Discrete-event simulation of rollout and trainer: trajectories per hour, staleness and waiting times.

    python -m tools.simulate_cluster check RUN... [--tolerance 0.15] [--seeds 20]
    python -m tools.simulate_cluster predict [--nodes 8 32] [--config FILE] [--card H100] [--set NAME=VALUE ...]
                                             [--quick] [--write docs/scaling.md]

check: simulates a run with its own settings and measured times, and compares the figures with those of the run; exit
code 1 if a figure differs by more than the tolerance.

predict: simulates clusters that were never measured, from the inputs in docs/scaling.md: every split of each node's
GPUs between engines and trainer, and all modes. --config takes the speed of engines and trainer from the cost model of
`webrl placement --time` instead.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_webrl.config.load import parse_config
from megatron_webrl.placement.hardware import CARDS
from tools.arguments import bounded_number
from tools.cluster import comparison, prediction

FIGURE_LABELS = {
    "per_hour": "trajectories/h",
    "staleness": "staleness, versions",
    "waiting": "trainer waits",
    "updates_per_hour": "updates/h",
}


def check(options: argparse.Namespace) -> int:
    """Compare runs with their simulations; exit code 1 if a figure differs. Raises ValueError or OSError."""
    agree = True
    for folder in options.runs:
        run = comparison.read_run(folder)
        rows, settings = comparison.compare_with_simulation(run, options.seeds, options.tolerance), run.settings
        agree &= all(row.agrees for row in rows)
        print(f"{run.name}: {settings.mode}, {settings.stepping}; {len(run.workload.groups)} groups, {options.seeds} "
              f"simulated runs of {settings.updates} updates; serial fraction of the engine {settings.serial:g}, its "
              f"speed while the trainer trains {settings.overlap:g}")  # fmt: skip
        print(f"{'':<20}{'measured':>10}{'simulated':>11}{'spread':>9}{'ratio':>7}  agrees")
        for row in rows:
            ratio, agrees = "" if row.ratio is None else f"{row.ratio:.2f}", "yes" if row.agrees else "NO"
            print(f"{FIGURE_LABELS[row.name]:<20}{row.measured:>10.4g}{row.simulated:>11.4g}{row.spread:>9.2g}"
                  f"{ratio:>7}  {agrees}")  # fmt: skip
    little = ", ".join(f"{FIGURE_LABELS[name]} {value:g}" for name, value in comparison.ABSOLUTE_TOLERANCE.items())
    verdict = "all agree" if agree else "not all agree"
    print(f"{verdict}: within {options.tolerance:.0%}, or by less than {little}")
    return 0 if agree else 1


def predict(options: argparse.Namespace) -> int:
    """Simulate clusters. Raises ValueError or OSError."""
    if options.card and not options.config:
        raise ValueError("--card names the GPUs of --config; add --config")
    inputs = prediction.SimulationInputs()
    if options.config:
        inputs = prediction.from_cost_model(inputs, parse_config(options.config, []), CARDS[options.card or "H100"])
    inputs = prediction.assign(inputs, options.set)
    page = options.write.read_text() if options.write else None
    length = prediction.QUICK if options.quick else prediction.FULL
    report = prediction.make_report(inputs, options.nodes, () if options.quick else prediction.INPUT_VARIANTS, length)
    print(f"{report}\n\nPredicted from the inputs, not measured: docs/scaling.md")
    if page is not None:
        options.write.write_text(prediction.update_page(page, report))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    count = bounded_number(int, 1)
    one = commands.add_parser("check", help="compare measured runs with their simulation")
    one.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    share = bounded_number(float, 0, exclusive=True)
    one.add_argument("--tolerance", type=share, default=0.15, metavar="SHARE", help="(default: 0.15)")
    one.add_argument("--seeds", type=count, default=20, metavar="N", help="simulated runs (default: 20)")
    one.set_defaults(command=check)
    other = commands.add_parser("predict", help="predict clusters")
    other.add_argument("--nodes", nargs="+", type=count, default=[8, 32], metavar="N", help="(default: 8 32)")
    other.add_argument("--config", metavar="FILE", help="configuration whose speed the cost model predicts")
    other.add_argument("--card", choices=tuple(CARDS), help="with --config: the GPU (default: H100)")
    other.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="changed inputs")
    other.add_argument("--quick", action="store_true", help="few updates, no changed inputs; figures mean little")
    other.add_argument("--write", type=Path, metavar="FILE", help="write the tables between the markers of this page")
    other.set_defaults(command=predict)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 for an input that cannot be read or simulated, or a file that cannot be written."""
    options = make_parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except (ValueError, OSError, RuntimeError) as error:
        print(f"simulate_cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
