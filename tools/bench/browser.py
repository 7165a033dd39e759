"""Benchmark of browser sessions against bare Playwright, BrowserGym and synchronised schedules.

    python -m tools.bench.browser [--quick] [--only SECTION ...] [--json FILE] [--plots FILE] [--add FILE ...]

Contestants take turns in rounds, so that noise of the machine affects all equally. Ratios are of medians of one run and
above 1 where this package is better. All sections take about ten minutes; `--only` runs some of them, and `--add` shows
the figures that earlier runs wrote with `--json`.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from tools.arguments import make_bench_parser, write_json
from tools.bench.browsers.bare_playwright import FULL, QUICK, BrowserBenchSize
from tools.bench.browsers.browsergym_peer import MISSING_MESSAGE, measure_browsergym
from tools.bench.browsers.concurrent_sessions import measure_memory, measure_waiting
from tools.bench.browsers.plots import draw
from tools.bench.browsers.report import Section, show
from tools.bench.browsers.resets import measure_resets
from tools.bench.browsers.steps import measure_encoding, measure_steps

SECTIONS: dict[str, Callable[[BrowserBenchSize, int], Coroutine[Any, Any, Section]]] = {
    "reset": measure_resets,
    "step": measure_steps,
    "memory": measure_memory,
    "waiting": measure_waiting,
    "encoding": measure_encoding,
}
BROWSERGYM = "browsergym"
REPORT_COLUMNS = 150  # if the output is no terminal


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_bench_parser(__doc__, "a minute at most; figures mean little")
    parser.add_argument(
        "--only", nargs="+", choices=[*SECTIONS, BROWSERGYM], metavar="SECTION", help=", ".join([*SECTIONS, BROWSERGYM])
    )
    parser.add_argument("--seed", type=int, default=0, help="of tasks, pages and waiting times (default: 0)")
    parser.add_argument("--browsergym-python", type=Path, metavar="PATH", help="interpreter that can import BrowserGym")
    parser.add_argument(
        "--add", type=Path, nargs="+", default=[], metavar="FILE", help="also show figures of earlier runs"
    )
    parser.add_argument("--plots", type=Path, metavar="FILE", help="draw the figures as SVG")
    options = parser.parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = REPORT_COLUMNS
    sections: dict[str, Section] = {}
    for file in options.add:
        for name, found in json.loads(file.read_text())["sections"].items():
            sections[name] = Section.from_json(found)
    wanted = options.only or ([] if options.add else [*SECTIONS, BROWSERGYM])
    amount = QUICK if options.quick else FULL
    for name in wanted:
        console.print(f"{name} ...", style="dim")
        if name != BROWSERGYM:
            sections[name] = asyncio.run(SECTIONS[name](amount, options.seed))
        elif options.browsergym_python is not None:
            sections[name] = asyncio.run(measure_browsergym(amount, options.seed, options.browsergym_python))
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
    console.print(f"{machine}; load at the end\n")
    show(console, sections)
    if BROWSERGYM in wanted and BROWSERGYM not in sections:
        console.print(f"\n{MISSING_MESSAGE}", soft_wrap=True)
    if options.json:
        figures = {name: section.to_json() for name, section in sections.items()}
        header = {"machine": machine, "seed": options.seed, "quick": options.quick, "at": datetime.now(UTC).isoformat()}
        write_json(options.json, header | {"sections": figures})
    if options.plots:
        options.plots.write_text(draw(sections))


if __name__ == "__main__":
    main()
