"""The command line of `webrl placement`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_placement(commands: Any) -> None:
    """Add the command to the parser's."""
    placement = commands.add_parser(
        "placement",
        help="which process runs where on a cluster, and whether its memory suffices",
        description="Place the processes of a configuration on the machines it describes (cluster.*): nodes, GPUs, "
        "cores, ports, rings. Nothing is looked up on a machine. Ends with 2 for what is impossible. docs/slurm.md",
        epilog="example: webrl placement configs/8b_32node.yaml cluster.nodes=16 --memory",
    )
    placement.add_argument("config", help="YAML file")
    placement.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    placement.add_argument("--json", type=Path, metavar="FILE", help="write every process there, too")
    placement.add_argument(
        "--memory", action="store_true", help="estimate the memory of a GPU, and refuse what exceeds it"
    )
    placement.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.cluster.placement_table import show_placement

    console = Console(width=None if sys.stdout.isatty() else 140)
    return show_placement(options.config, options.overrides, options.json, options.memory, console)
