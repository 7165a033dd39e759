"""The `webrl` command. Each role imports only its own packages: a trainer no vLLM, a worker no Megatron."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl import __version__
from megatron_webrl.browser.server.commands import add_browsers
from megatron_webrl.checks.command import add_check, with_part
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.command import add_judge
from megatron_webrl.launch.elsewhere import load_config_elsewhere
from megatron_webrl.launch.evaluation_command import add_eval
from megatron_webrl.launch.role_process import INFRASTRUCTURE_EXIT_CODE, is_file_system_failure
from megatron_webrl.launch.slurm.commands import add_node
from megatron_webrl.launch.task_validation import check_evaluators, check_tasks_and_browser
from megatron_webrl.launch.upload_command import add_upload
from megatron_webrl.launch.validation import load_config
from megatron_webrl.monitor.command import add_monitor
from megatron_webrl.monitor.mlflow_command import add_mlflow
from megatron_webrl.monitor.status.command import add_status
from megatron_webrl.monitor.timeline.command import add_timeline
from megatron_webrl.placement.placement_command import add_placement
from megatron_webrl.tasks.command import add_tasks
from megatron_webrl.types import failed_outcome
from megatron_webrl.util import stack_dump
from megatron_webrl.util.printable import printable
from megatron_webrl.util.redaction import configure_logging, redact
from megatron_webrl.util.text import first_line
from megatron_webrl.weights.engine_garbage import collect_garbage

if TYPE_CHECKING:
    from types import FrameType

    from megatron_webrl.control.client import ControlClient
    from megatron_webrl.ring.node_ring import NodeRing

log = logging.getLogger(__name__)

RENAMED = {"doctor": "check", "parity": "check model", "gpu-check": "check gpu"}
LOG_FORMAT = "%(asctime)s {role} %(levelname)s %(name)s: %(message)s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parse(arguments)
    stack_dump.register_dump_signal()
    os.umask(os.umask(0o077) | 0o077)  # runs and results are their owner's: pages, logs and episodes may be private
    try:
        return options.run(options)
    except ConfigError as error:
        sys.stderr.write(f"webrl: {printable(redact(str(error)))}\n")
        return 2


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
    add_mlflow(commands)
    add_upload(commands)
    add_tasks(commands)
    add_node(commands)
    _add_control(commands)
    _add_roles(commands)
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


def _add_control(commands: Any) -> None:
    control = commands.add_parser("control", help="the control service (started by `train` and by Slurm scripts)")
    _add_config(control)
    control.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    control.add_argument("--port", type=int, default=0, help="port to listen on (default: 0, any free one)")
    control.add_argument("--address-file", type=Path, required=True, help="file that receives address and token")
    control.add_argument("--journal", type=Path, required=True, help="file from which it continues if started again")
    control.set_defaults(run=_control)


def _add_roles(commands: Any) -> None:
    for name, run, text in (
        ("trainer", _trainer, "one trainer rank, named by RANK, WORLD_SIZE and LOCAL_RANK"),
        ("rollout", _rollout, "one rollout worker"),
    ):
        role = commands.add_parser(name, help=text)
        _add_config(role)
        role.add_argument(
            "--control", required=True, type=Path, metavar="FILE", help="address file of the control service"
        )
        role.add_argument(
            "--node",
            type=int,
            default=0,
            metavar="N",
            help="number of this node, from 0 (default: 0); the role uses its ring",
        )
        only = role.add_mutually_exclusive_group()
        only.add_argument("--weights-only", action="store_true", help="only send or receive weights")
        if name == "trainer":
            role.add_argument(
                "--attempt", type=int, default=0, metavar="N", help="number of earlier trainer attempts in this job"
            )
        else:
            role.add_argument("--worker", type=int, required=True, metavar="N", help="number of this worker, from 0")
            only.add_argument(
                "--follower",
                type=int,
                default=0,
                metavar="N",
                help="run follower N, from 1, of the worker's engine, which spans several nodes",
            )
        role.set_defaults(run=run)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, help="resolved configuration of the run")
    parser.add_argument("overrides", nargs="*", metavar="key=value")


def _train(options: argparse.Namespace) -> int:
    if options.elsewhere and not options.check:
        raise ConfigError("--elsewhere only checks; add --check, or leave it out to start the run here")
    if options.elsewhere:
        config, lacking = load_config_elsewhere(options.config, options.overrides)
        for message in lacking:
            sys.stderr.write(f"left to the job's nodes: {message}\n")
    else:
        config = load_config(options.config, options.overrides)
        check_tasks_and_browser(config)
        check_evaluators(config)
    if options.check:
        import dataclasses

        import yaml

        sys.stdout.write(redact(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)))
        return 0
    from rich.console import Console

    from megatron_webrl.launch.local_launcher import launch

    return launch(config, Console())


def _demonstrate(options: argparse.Namespace) -> int:
    import asyncio

    from rich.console import Console

    from megatron_webrl.rollout.demonstrations import write_demonstrations
    from megatron_webrl.track.dashboard import progress_bar

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


def _control(options: argparse.Namespace) -> int:
    from megatron_webrl.control.service import serve
    from megatron_webrl.ring.segment import segment_name

    config = _role(options, "control")
    job_id = segment_name(config.run.name, secrets.token_hex(4))
    timeout_seconds = config.run.heartbeat_timeout_seconds
    serve(options.host, options.port, job_id, options.address_file, options.journal, timeout_seconds)
    return 0


def _trainer(options: argparse.Namespace) -> int:
    from megatron_webrl.placement.placement import check_node_number
    from megatron_webrl.placement.rank_info import RankInfo

    rank = RankInfo.from_environment()
    name = f"trainer-{rank.rank}"
    config = _role(options, name)
    check_node_number(config, options.node)

    def run(control: ControlClient, ring: NodeRing) -> None:
        from megatron_webrl.model import platform

        gc.disable()  # collections of what imports keep are a fifth of their time
        platform.activate(config.model.platform)  # before Megatron is imported
        from megatron_webrl.trainer import main as training
        from megatron_webrl.trainer import weight_sync_check

        collect_garbage()
        if options.weights_only:
            weight_sync_check.run(config, control, rank, ring)
        else:
            training.run(config, control, rank, ring, options.attempt)

    restartable = config.run.max_trainer_restarts > 0 and not options.weights_only
    return _run_role(options, config, name, run, restartable)


def _rollout(options: argparse.Namespace) -> int:
    from megatron_webrl.placement.placement import check_node_number, engine_nodes, rollout_process_name

    worker, number = options.worker, options.follower
    name = rollout_process_name(worker, number)
    config = _role(options, name)
    check_node_number(config, options.node)
    nodes = engine_nodes(config, worker)
    if not 0 <= number < len(nodes):
        raise ConfigError(f"--follower={number} is not among the {len(nodes)} nodes of engine {worker}, from 0")
    gc.disable()
    from megatron_webrl.rollout import main as working
    from megatron_webrl.rollout.engine import engine_follower

    collect_garbage()

    def run(control: ControlClient, ring: NodeRing) -> None:
        if number:
            engine_follower.run(config, control, worker, number, len(nodes), ring)
        else:
            working.run(config, control, worker, ring, nodes, options.weights_only)

    return _run_role(options, config, name, run, restartable=True)


def _role(options: argparse.Namespace, name: str) -> Config:
    """Set up logging and the fault handler of a role, and read its configuration."""
    faulthandler.enable()
    configure_logging(LOG_FORMAT.format(role=name))
    return parse_config(options.config, options.overrides)


def _run_role(
    options: argparse.Namespace,
    config: Config,
    name: str,
    run: Callable[[ControlClient, NodeRing], None],
    restartable: bool,
) -> int:
    """Run a role in a job; returns the exit code. JobFailed in a trainer rank ends the job with an error that names it.
    After other exceptions a `restartable` role leaves the decision to its supervisor; a rollout worker always does.
    """
    from megatron_webrl.control.client import ControlClient
    from megatron_webrl.control.connection import JobEnded, JobFailed
    from megatron_webrl.placement.placement import worker_name_of

    control = ControlClient(options.control, name)
    try:
        run(control, _ring(config, options.node, control.job_id))
    except JobEnded:
        log.info("the job has ended")
    except JobFailed as error:  # another role has ended the job and is named in the error, or a wait timed out
        log.error("%s", error)
        if worker_name_of(name) not in config.worker_names:
            control.end_job(f"failed: {error}")
        return 1
    except Exception as error:
        log.exception("failed")
        message, infrastructure = f"{type(error).__name__}: {first_line(error)}", is_file_system_failure(error)
        if not restartable:
            control.end_job(failed_outcome(f"{name}: {message}", infrastructure))
        log.error("%s", message)  # the last line of the log, which the launcher shows
        return INFRASTRUCTURE_EXIT_CODE if infrastructure else 1
    return 0


def _ring(config: Config, node: int, job_id: str) -> NodeRing:
    """The ring of a node. On a job of one node the ring's name is the job's id."""
    from megatron_webrl.placement.placement import ring_name
    from megatron_webrl.ring.node_ring import NodeRing

    return NodeRing(node, ring_name(config, node) if config.cluster.nodes > 1 else job_id, job_id)
