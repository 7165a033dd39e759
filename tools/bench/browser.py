"""Browser sessions against bare Playwright and BrowserGym.

    python -m tools.bench.browser [--quick] [--only SECTION ...] [--json FILE]

Contestants take turns in rounds, so that noise of the machine affects all equally. Ratios are of medians of one run and
above 1 where this package is better. All sections take about five minutes.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.arguments import make_bench_parser, write_json
from tools.bench.browsers.bare_playwright import FULL, QUICK, BrowserBenchSize
from tools.bench.browsers.browsergym_peer import MISSING_MESSAGE, measure_browsergym
from tools.bench.browsers.report import Section, show
from tools.bench.browsers.resets import measure_resets
from tools.bench.browsers.steps import measure_steps

SECTIONS: dict[str, Callable[[BrowserBenchSize, int], Coroutine[Any, Any, Section]]] = {
    "reset": measure_resets,
    "step": measure_steps,
}
BROWSERGYM = "browsergym"
REPORT_COLUMNS = 150  # if the output is no terminal


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_bench_parser(__doc__, "a minute at most; figures mean little")
    names = [*SECTIONS, BROWSERGYM]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument("--seed", type=int, default=0, help="of tasks and pages (default: 0)")
    parser.add_argument("--browsergym-python", type=Path, metavar="PATH", help="interpreter that can import BrowserGym")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = REPORT_COLUMNS
    amount = QUICK if options.quick else FULL
    sections: dict[str, Section] = {}
    for name in options.only:
        if name != BROWSERGYM:
            sections[name] = asyncio.run(SECTIONS[name](amount, options.seed))
        elif options.browsergym_python is not None:
            sections[name] = asyncio.run(measure_browsergym(amount, options.seed, options.browsergym_python))
        else:
            console.print(MISSING_MESSAGE, soft_wrap=True)
            continue
        show(console, sections[name])
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    console.print(machine)
    write_json(options.json, {"machine": machine, "sections": {name: asdict(each) for name, each in sections.items()}})


if __name__ == "__main__":
    main()
