"""Print where the time of tests went, from the JUnit files that `make test` and `make test-all` wrote.

Columns, in seconds: wall time; processor time of pytest itself; processor time of the processes that tests started and
waited for; the rest, in which a test waited for something else. Processes that outlive their test count for the file in
which they end.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

COLUMNS = ("wall", "pytest", "processes", "waiting")


def read(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Times [4] by test and by module.

    Raises:
        SystemExit: no file of times is there.
    """
    tests: dict[str, np.ndarray] = {}
    modules: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(len(COLUMNS)))
    files = sorted(folder.glob("*.xml"))
    if not files:
        raise SystemExit(f"{folder} has no times: run `make test` first")
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            used = {each.get("name"): float(each.get("value", 0)) for each in case.iter("property")}
            wall, own, children = float(case.get("time", 0)), used.get("own_cpu", 0.0), used.get("children_cpu", 0.0)
            times = np.array([wall, own, children, max(0.0, wall - own - children)])
            tests[f"{case.get('classname')}::{case.get('name')}"] = times
            modules[str(case.get("classname"))] += times
    return tests, modules


def table(title: str, rows: dict[str, np.ndarray], limit: int) -> str:
    """The slowest rows, and the sum of all."""
    lines = ["".join(f"{each:>11}" for each in COLUMNS) + f"  {title}"]
    slowest = sorted(rows, key=lambda name: -rows[name][0])[:limit]
    total = np.sum(list(rows.values()), axis=0)
    for name, times in [*((name, rows[name]) for name in slowest), (f"all {len(rows)}", total)]:
        lines.append("".join(f"{each:11.1f}" for each in times) + f"  {name}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/tests"), help="JUnit files")
    parser.add_argument("--limit", type=int, default=25, help="rows of a table")
    arguments = parser.parse_args()
    tests, modules = read(arguments.folder)
    print(table("module", modules, arguments.limit), table("test", tests, arguments.limit), sep="\n\n")


if __name__ == "__main__":
    main()
