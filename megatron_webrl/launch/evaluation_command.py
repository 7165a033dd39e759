"""The command line of `webrl eval`, on this machine and as the first part of a job of several nodes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import config_text
from megatron_webrl.launch.validation import check_job
from megatron_webrl.util.text import redact


def add_eval(commands: Any) -> None:
    """Add `webrl eval` to the parser."""
    evaluation = commands.add_parser(
        "eval",
        help="success rate of a checkpoint on held-out tasks",
        description="Run the agent with the weights of a checkpoint on held-out tasks, on this machine; "
        "launch/slurm/eval.sh does so on several. Exit code 1: failed, episodes are missing, or judge.budget is spent; "
        "2: bad input; 130: Ctrl-C. docs/evaluation.md",
        epilog="example: webrl eval runs/quickstart/checkpoints evaluation.episodes=50 --json result.json",
    )
    add_evaluation_arguments(evaluation)
    evaluation.add_argument(
        "--check", action="store_true", help="check the configuration, print all settings, and start nothing"
    )
    evaluation.set_defaults(run=_eval)


def add_evaluation_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint, its configuration, and the options of an evaluation."""
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="Hugging Face folder, checkpoint of a run, or the run"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="CONFIG key=value",
        help="YAML file (default: config.yaml of the checkpoint's run), and settings that replace those of the file",
    )
    for option, key, text in (
        ("--episodes", "episodes", "held-out tasks of each environment"),
        ("--samples", "samples", "episodes of each task, for pass@k"),
        ("--temperature", "temperature", "sampling temperature; 0: greedy"),
    ):
        parser.add_argument(option, metavar="N", help=f"{text} (evaluation.{key})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results and episodes to FILE, too")


def evaluation_arguments(options: argparse.Namespace) -> list[str]:
    """The configuration file, if given, and all overrides."""
    chosen = {key: getattr(options, key) for key in ("episodes", "samples", "temperature")}
    overrides = [f"evaluation.{key}={value}" for key, value in chosen.items() if value is not None]
    return [*options.overrides, *overrides]


def _eval(options: argparse.Namespace) -> int:
    from rich.console import Console

    from megatron_webrl.launch.evaluation import (
        CheckpointEvaluation,
        EvaluatedCheckpoint,
        check_output_file,
        parse_evaluation_config,
    )
    from megatron_webrl.launch.local import run_here

    checkpoint = EvaluatedCheckpoint.resolve(options.checkpoint)
    config = parse_evaluation_config(checkpoint, evaluation_arguments(options))
    check_job(config)
    check_output_file(options.json)
    if options.check:
        sys.stdout.write(redact(config_text(config)))
        return 0
    return run_here(config, Console(), CheckpointEvaluation(config, checkpoint, options.json))
