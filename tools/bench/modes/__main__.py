"""Time to a success of sampled episodes in asynchronous and synchronous modes: the quickstart's job, mode by mode.

    python -m tools.bench.modes [--seeds N ...] [--success SHARE] [--folder DIR] [--json FILE]
    python -m tools.bench.modes --quick

Every job is `webrl train configs/quickstart.yaml`; jobs differ in rollout.mode, rollout.stepping and seed only, and
stop once success, smoothed over --window updates, has reached --success. With --folder, a finished run is stored and
not repeated, so an interrupted call can be given again. docs/benchmarks.md describes the table.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from tools.arguments import bounded_number, make_bench_parser, write_json
from tools.bench.modes.runs import CONFIG, MODES, QUICK, Bench, Target, measure
from tools.bench.modes.table import make_table, mode_figures

SUCCESS, WINDOW = 0.7, 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = make_bench_parser(__doc__, "two small updates of one seed each, to check the parts")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="one run of each mode each"
    )
    parser.add_argument("--success", type=bounded_number(float, 0), default=SUCCESS, metavar="SHARE",
                        help=f"of sampled episodes, smoothed (default: {SUCCESS})")  # fmt: skip
    parser.add_argument("--window", type=bounded_number(int, 1), metavar="N",
                        help=f"updates over which success is smoothed (default: {WINDOW}; 1 with --quick)")  # fmt: skip
    parser.add_argument("--updates", type=bounded_number(int, 1), metavar="N",
                        help=f"limit, and length of the schedule (default: that of {CONFIG.name})")  # fmt: skip
    parser.add_argument("--set", nargs="+", default=[], metavar="SETTING=VALUE", help="settings of all jobs")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep runs there; those that it holds are not run")
    options = parser.parse_args(arguments)
    updates = options.updates or (2 if options.quick else parse_config(CONFIG).trainer.updates)
    target = Target(options.success, options.window or (1 if options.quick else WINDOW), updates)
    if target.success > 1:
        parser.error(f"--success={target.success} is a share, at most 1")
    if target.window > updates:
        parser.error(f"--window={target.window} is more than the {updates} updates of a run (--updates)")
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    with ExitStack() as stack:
        try:
            folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="webrl-bench-")))
            status = stack.enter_context(console.status("starting"))
            overrides = (*(QUICK if options.quick else ()), *options.set)
            bench = Bench(folder.absolute(), target, overrides, console.print, status.update)
            seeds = options.seeds[:1] if options.quick else options.seeds
            histories = measure(bench, tuple(MODES), list(dict.fromkeys(seeds)))
        except KeyboardInterrupt:
            kept = f"; {options.folder} holds the finished runs" if options.folder else ""
            sys.stderr.write(f"bench.modes: interrupted{kept}\n")
            return 130
        except (RuntimeError, OSError, ConfigError) as error:
            sys.exit(f"bench.modes: {error}")
    figures = mode_figures(histories, target)
    console.print(make_table(figures, target))
    write_json(
        options.json,
        {
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "quick": options.quick,
            "settings": overrides,
            "target": asdict(target),
            "modes": [each.to_json() for each in figures],
            "runs": [asdict(history) for history in histories],
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
