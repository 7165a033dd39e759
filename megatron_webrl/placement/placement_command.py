"""The command line of `webrl placement`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.placement.performance.cards import CARDS


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
    placement.add_argument(
        "--time", action="store_true", help="predict the seconds of an update's parts; docs/performance.md"
    )
    placement.add_argument("--card", choices=tuple(CARDS), help="with --time: the GPU (default: H100)")
    placement.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.placement.placement_table import show_placement

    if options.card and not options.time:
        raise ConfigError("--card names the GPU of --time; add --time")
    card = CARDS[options.card or "H100"] if options.time else None
    console = Console(width=None if sys.stdout.isatty() else 140)
    return show_placement(options.config, options.overrides, options.json, options.memory, console, card)
