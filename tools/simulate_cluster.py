"""Compare measured runs with their simulation: trajectories per hour, staleness and waiting times.

    python -m tools.simulate_cluster RUN... [--tolerance 0.15] [--seeds 20]

Simulates a run (megatron_webrl/placement/simulation.py) with its own settings and measured times, and compares the
figures with those of the run; exit code 1 if a figure differs by more than the tolerance. `webrl placement --time`
predicts jobs that never ran.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.arguments import bounded_number
from tools.cluster import comparison

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
              f"simulated runs of {settings.updates} updates; serial fraction of the engine {run.serial:g}, its "
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


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    share, count = bounded_number(float, 0, exclusive=True), bounded_number(int, 1)
    parser.add_argument("--tolerance", type=share, default=0.15, metavar="SHARE", help="(default: 0.15)")
    parser.add_argument("--seeds", type=count, default=20, metavar="N", help="simulated runs (default: 20)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 for an input that cannot be read or simulated."""
    options = make_parser().parse_args(arguments)
    try:
        return check(options)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"simulate_cluster: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
