"""Write task files in WebGym's format about the offline websites, and what is true of each task.

    python -m tools.make_webgym_tasks FOLDER [--tasks 240] [--test 40] [--seed 0]

FOLDER gets train.jsonl, test.jsonl (of other websites) and truth.jsonl, which the oracle of tools.offline.site_truth
reads. Equal arguments give equal files. One task in twenty is of a website that denies access, and one of a website
that denies it to half of its visitors.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.tasks.sites.questions import WebsiteGoal
from tools.arguments import bounded_number
from tools.offline.task_rows import FILES, draw_goals, level_of, task_row, truth_of, write_lines
from tools.offline.task_rows import truth_row as as_row

DEFAULT_TASKS, DEFAULT_TEST_TASKS = 240, 40


def write_task_files(folder: Path, tasks: int, test_tasks: int, seed: int) -> dict[str, list[WebsiteGoal]]:
    """Write the files; returns the goals by file. Raises ValueError for too many tasks, OSError."""
    if test_tasks >= tasks:
        raise ValueError(f"--test={test_tasks} of --tasks={tasks} leaves no task of training; ask for fewer")
    counts = {"train": tasks - test_tasks, "test": test_tasks}
    goals = {file: draw_goals(file, counts[file], random.Random(f"webgym/{seed}/{file}")) for file in FILES}
    folder.mkdir(parents=True, exist_ok=True)
    for file, found in goals.items():
        write_lines(folder / f"{file}.jsonl", [task_row(goal) for goal in found])
    write_lines(
        folder / "truth.jsonl", [as_row(truth_of(goal, file)) for file, found in goals.items() for goal in found]
    )
    return goals


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line. Exit code 2: bad input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the files are written")
    count = bounded_number(int, 1)
    parser.add_argument("--tasks", type=count, default=DEFAULT_TASKS, help="tasks of both files (default: %(default)s)")
    parser.add_argument(
        "--test", type=count, default=DEFAULT_TEST_TASKS, help="tasks of test.jsonl among them (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="other seeds draw other tasks (default: 0)")
    options = parser.parse_args(arguments)
    try:
        goals = write_task_files(options.folder, options.tasks, options.test, options.seed)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"make_webgym_tasks: {error}\n")
        return 2
    for file, found in goals.items():
        levels = Counter(level_of(len(goal.goal.facts)) for goal in found)
        websites = len({goal.host for goal in found})
        print(f"{file}.jsonl: {len(found)} tasks of {websites} websites, {dict(levels)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
