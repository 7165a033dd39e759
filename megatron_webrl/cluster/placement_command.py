"""The command line of `webrl placement`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_placement(commands: Any) -> None:
    """Add `placement` to the commands of `webrl`."""
    placement = commands.add_parser(
        "placement",
        help="show which process runs where on a cluster, and estimate its memory",
        description="Place the processes of a configuration on the machines it describes (cluster.*): nodes, GPUs, "
        "cores, ports, rings. Reads the configuration only, no machine. Exit code 2: impossible. docs/slurm.md",
        epilog="example: webrl placement configs/8b_32node.yaml cluster.nodes=16 --memory",
    )
    placement.add_argument("config", help="YAML file")
    placement.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    placement.add_argument("--json", type=Path, metavar="FILE", help="also write every process to this file")
    placement.add_argument(
        "--memory", action="store_true", help="estimate the memory of each GPU; an error if it does not fit"
    )
    placement.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.cluster.placement_table import show_placement

    console = Console(width=None if sys.stdout.isatty() else 140)
    return show_placement(options.config, options.overrides, options.json, options.memory, console)
