"""The command line of `webrl tasks`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FILE_SOURCES

WIDTH = 140  # of tables that do not go to a terminal


def add_tasks(commands: Any) -> None:
    """Add `webrl tasks` to the parser."""
    tasks = commands.add_parser("tasks", help="look at task files")
    check = tasks.add_subparsers(required=True, metavar="COMMAND").add_parser(
        "check",
        help="count the tasks of a file, and find rows that do not fit",
        description="Read a task file as a run would, and report counts by difficulty, domain and benchmark, "
        "duplicates, and the rows that do not fit; with --against also the websites that are in both files. Exit code "
        "0: no fault; 1: duplicates, rows that do not fit, or shared websites; 2: bad input. docs/tasks.md",
        epilog="example: webrl tasks check train.jsonl --against test.jsonl",
    )
    check.add_argument(
        "file", metavar="FILE", help="JSONL or Parquet file, folder of a dataset, or NAME:SPLIT of the Hugging Face hub"
    )
    check.add_argument("--against", metavar="FILE", help="file whose websites must be others, such as the test file")
    check.add_argument(
        "--format", choices=FILE_SOURCES, default=FILE_SOURCES[0], help=f"of both files (default: {FILE_SOURCES[0]})"
    )
    check.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="TASK_FIELD=FIELD",
        help="field of the file that holds a field of a task, as in tasks.fields; can be repeated",
    )
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE, too")
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.tasks.files.report import inspect_file, render
    from megatron_webrl.tasks.files.rows import make_field_map

    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json={options.json}: {options.json.absolute().parent} is not a folder")
    fields = make_field_map(options.format, _parse_fields(options.field))
    files = {"FILE": options.file, "--against": options.against}
    reports = [inspect_file(name, setting, fields) for setting, name in files.items() if name is not None]
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    report, *others = reports
    shared = sorted(report.websites & others[0].websites) if others else []
    for each in reports:
        console.print(render(each), soft_wrap=True)  # messages stay on one line each; tables keep to the width
    if others:
        names = f": {', '.join(shared[:20])}{', ...' if len(shared) > 20 else ''}" if shared else ""
        console.print(f"websites in both files: {len(shared)}{names}", markup=False, highlight=False, soft_wrap=True)
    faulty = bool(shared) or any(each.faulty for each in reports)
    if options.json is not None:
        content: dict[str, Any] = {"faulty": faulty, **report.to_json()}
        if others:
            content |= {"against": others[0].to_json(), "shared_websites": shared}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(faulty)


def _parse_fields(arguments: list[str]) -> dict[str, str]:
    fields = {}
    for argument in arguments:
        name, equals, column = argument.partition("=")
        if not equals:
            raise ConfigError(f"--field={argument!r} is not of the form TASK_FIELD=FIELD, such as instruction=goal")
        fields[name] = column
    return fields
