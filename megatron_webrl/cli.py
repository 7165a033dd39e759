"""The `webrl` command. Each role imports only its own packages: a trainer no vLLM, a worker no Megatron."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl import __version__
from megatron_webrl.browser.server.commands import add_browsers
from megatron_webrl.checks.command import add_check, with_part
from megatron_webrl.config.load import config_text
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.command import add_judge
from megatron_webrl.launch.evaluation_command import add_eval
from megatron_webrl.launch.role import add_role, run_command
from megatron_webrl.launch.slurm.commands import add_node
from megatron_webrl.launch.upload_command import add_upload
from megatron_webrl.launch.validation import (
    check_job,
    check_tasks_and_browser,
    load_config,
    load_config_elsewhere,
    parse_training_config,
)
from megatron_webrl.monitor.command import add_monitor, add_status, add_timeline
from megatron_webrl.placement.placement_table import add_placement
from megatron_webrl.tasks.command import add_tasks
from megatron_webrl.util.text import redact

if TYPE_CHECKING:
    from types import FrameType


RENAMED = {"doctor": "check", "parity": "check model", "gpu-check": "check gpu"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    return run_command(_parse(arguments))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, with settings allowed after options, which argparse does not recognize."""
    parser, arguments = _parser(), with_part(list(sys.argv[1:] if arguments is None else arguments))
    if new := RENAMED.get(arguments[0] if arguments else ""):
        parser.error(f"`webrl {arguments[0]}` is now `webrl {new}`")
    options, others = parser.parse_known_args(arguments)
    if others and (not hasattr(options, "overrides") or any(each.startswith("-") for each in others)):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if others:
        options.overrides += others
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="webrl", description="Train visual web agents with reinforcement learning.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    add_check(commands)
    _add_demonstrate(commands)
    add_eval(commands)
    add_judge(commands)
    add_browsers(commands)
    add_placement(commands)
    add_status(commands)
    add_timeline(commands)
    add_monitor(commands)
    add_upload(commands)
    add_tasks(commands)
    add_node(commands)
    add_role(commands)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="run all roles on this machine")
    train.add_argument("config", help="YAML file, such as configs/quickstart.yaml")
    train.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    train.add_argument(
        "--check", action="store_true", help="check the configuration, print all settings, and start nothing"
    )
    train.add_argument(
        "--elsewhere",
        action="store_true",
        help="with --check: the job runs on other machines; list what this one lacks (model, packages, files, keys, "
        "shared memory) instead of failing",
    )
    train.set_defaults(run=_train)


def _add_demonstrate(commands: Any) -> None:
    parser = commands.add_parser(
        "demonstrate",
        help="write scripted episodes for a warm start",
        description="Solve the tasks of a configuration with scripted policies, in the agent's observation and action "
        "format, and write trainer.warm_start.demonstrations successes to a file for "
        "trainer.warm_start.demonstrations_file. Exit code 1: failed; 2: bad input; 130: Ctrl-C; 143: SIGTERM. The "
        "file appears when it is complete.",
        epilog="example: webrl demonstrate my.yaml trainer.warm_start.demonstrations=99 --out my.records",
    )
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="output file")
    parser.set_defaults(run=_demonstrate)


def _train(options: argparse.Namespace) -> int:
    if options.elsewhere and not options.check:
        raise ConfigError("--elsewhere only checks; add --check, or leave it out to start the run here")
    if options.elsewhere:
        config, lacking = load_config_elsewhere(options.config, options.overrides)
        for message in lacking:
            sys.stderr.write(f"left to the job's nodes: {message}\n")
    else:
        config = parse_training_config(options.config, options.overrides)
        check_job(config)
    if options.check:
        sys.stdout.write(redact(config_text(config)))
        return 0
    from rich.console import Console

    from megatron_webrl.launch.local import run_here

    return run_here(config, Console())


def _demonstrate(options: argparse.Namespace) -> int:
    import asyncio

    from rich.console import Console

    from megatron_webrl.rollout.demonstrations import write_demonstrations
    from megatron_webrl.track.tables import progress_bar

    config = load_config(options.config, options.overrides)
    count = config.trainer.warm_start.demonstrations
    if not count:
        raise ConfigError("trainer.warm_start.demonstrations=0; set the number of episodes")
    if not options.out.absolute().parent.is_dir():
        raise ConfigError(f"--out={options.out}: {options.out.absolute().parent} is not a folder")
    check_tasks_and_browser(config)
    console, received = Console(), [signal.SIGINT]

    def handle_sigterm(number: int, frame: FrameType | None) -> None:  # a clean end, as after Ctrl-C
        received.append(signal.Signals(number))
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, handle_sigterm)
    try:
        with progress_bar(console) as bar:
            task = bar.add_task("demonstrations", total=count)
            asyncio.run(write_demonstrations(config, count, options.out, lambda n: bar.update(task, completed=n)))
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written")
        return 128 + received[-1]
    except RuntimeError as error:  # missing browsers, or too many failures
        sys.stderr.write(f"webrl: {error}\n")
        return 1
    console.print(f"{options.out}: {count} demonstrations")
    return 0
