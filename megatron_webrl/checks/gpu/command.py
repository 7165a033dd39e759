"""The command line of `webrl gpu-check`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_webrl.checks.gpu.request import SECTIONS, GpuCheckRequest

DEFAULT_CONFIG = "configs/tiny_1gpu.yaml"


def add_gpu_check(commands: Any) -> None:
    """Add `gpu-check` to the commands of `webrl`."""
    parser = commands.add_parser(
        "gpu-check",
        help="prove that a machine computes, sends weights and trains as it should",
        description="Check this machine section by section, in ten minutes at most: environment, the reports of the "
        "nodes of a Slurm job, the model on one GPU against transformers, speed and memory, links between its GPUs "
        "with peers that die, and a short whole job. docs/gpu.md says what each line means. Exit code 1: something "
        "failed; 2: invalid input.",
        epilog="example: webrl gpu-check configs/8b_1node.yaml --json gpu.json",
    )
    parser.add_argument(
        "config", nargs="?", default=DEFAULT_CONFIG, help=f"YAML file of the job (default: {DEFAULT_CONFIG})"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument(
        "--platform", choices=("auto", "cpu", "cuda"), default="auto", help="device (default: auto: model.platform; "
        "if that is auto, too, CUDA where the machine has a GPU)",
    )  # fmt: skip
    parser.add_argument(
        "--section", action="append", choices=SECTIONS, metavar="NAME", dest="sections",
        help=f"check only this section; may be repeated: {', '.join(SECTIONS)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE, to attach to an issue")
    parser.add_argument(
        "--timeout-seconds", type=float, default=600.0, metavar="S", help="limit of all sections (default: 600)"
    )
    parser.add_argument(
        "--min-link-gb-per-second", type=float, default=0.0, metavar="X",
        help="least speed between two GPUs, GB/s (default: half of the median of all pairs)",
    )  # fmt: skip
    parser.add_argument(
        "--node-report", action="append", type=Path, default=[], metavar="FILE", dest="node_reports",
        help="report of `webrl node check` to include; may be repeated",
    )  # fmt: skip
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.checks.gpu.run import run_check
    from megatron_webrl.config.load import parse_config
    from megatron_webrl.config.setting import ConfigError

    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json={options.json}: the folder {options.json.absolute().parent} does not exist")
    if not options.timeout_seconds > 0:
        raise ConfigError(f"--timeout-seconds={options.timeout_seconds:g} must be greater than 0")
    console = Console(width=None if sys.stdout.isatty() else 160)
    asked = options.platform
    if asked == "auto":
        asked = parse_config(options.config, options.overrides).model.platform
    platform, cuda_problem = _choose_platform(asked)
    if asked == "auto" and platform == "cpu":
        console.print("no GPU on this machine: all sections compute on its cores (--platform auto)", markup=False)
    config = parse_config(options.config, [*options.overrides, f"model.platform={platform}"])
    request = GpuCheckRequest(
        config=config,
        platform=platform,
        cuda_problem=cuda_problem,
        sections=tuple(section for section in SECTIONS if section in (options.sections or SECTIONS)),
        timeout_seconds=options.timeout_seconds,
        min_link_gb_per_second=options.min_link_gb_per_second,
        node_reports=tuple(options.node_reports),
    )
    return run_check(request, console, options.json, ["webrl", *sys.argv[1:]])


def _choose_platform(asked: str) -> tuple[str, str]:
    """The platform for "auto", "cpu" or "cuda", and why torch cannot use CUDA although it is chosen."""
    from megatron_webrl.util import cuda_driver
    from megatron_webrl.util.gpu import has_gpu

    problem = "" if asked == "cpu" else cuda_driver.find_cuda_problem()
    if asked == "cpu" or (asked == "auto" and problem and not has_gpu() and not cuda_driver.lists_gpus()):
        return "cpu", ""
    return "cuda", problem
