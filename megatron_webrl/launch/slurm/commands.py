"""`webrl node`: the commands that launch/slurm/*.sh run on the first node or on every node. docs/slurm.md"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from megatron_webrl.config.browser import parse_server_addresses
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.evaluation_command import add_evaluation_arguments, evaluation_arguments
from megatron_webrl.launch.run_folder import (
    RoleStartError,
    control_address_path,
    read_placement,
    wait_for_control_address,
)
from megatron_webrl.track.run_lock import Launch, launch_of_process

if TYPE_CHECKING:  # it imports an HTTP server
    from megatron_webrl.control.http.http_service import ListenAddress

STOP_SECONDS = 30.0  # for the control service to answer `stop`
TOO_FEW_NODES_EXIT_CODE = 76  # of `choose`: too few nodes passed the check


def add_node(commands: Any) -> None:
    """Add `webrl node` and its subcommands to the parser."""
    node = commands.add_parser("node", help="the commands of a cluster job, which launch/slurm/ runs")
    parts = node.add_subparsers(required=True, metavar="PART")

    prepare = parts.add_parser(
        "prepare", help="check a configuration and make the run's folder; prints the path of its config.yaml"
    )
    listing = parts.add_parser("commands", help="print every process of a job, its node, and its full command")
    for part, run in ((prepare, _prepare), (listing, _commands)):
        part.add_argument("config", help="YAML file, such as configs/8b_32node.yaml")
        part.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
        part.add_argument("--servers", metavar="URLS", help="use these browser servers instead of the job's own")
        _add_stub_command(part)
        part.set_defaults(run=run)

    browsers = parts.add_parser("browsers", help="run the browser server of this node for a job")
    browsers.add_argument("config", help="YAML file of the job")
    browsers.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    browsers.add_argument(
        "--servers", required=True, metavar="URLS", help="addresses of all browser servers, separated by commas"
    )
    browsers.set_defaults(run=_browsers)

    _add_evaluation(parts)

    choose = _add_part(parts, "choose", "print the nodes to use: the first that passed the check", _choose)
    choose.add_argument("nodes", nargs="+", metavar="NODE", help="the nodes of the job, in Slurm's order")
    choose.add_argument("--unchecked", action="store_true", help="use all nodes, without a check")

    text = "host the control service, report the job's progress, and collect the results of an evaluation"
    host = _add_part(parts, "control", text, _control)
    host.add_argument("--host", default=socket.gethostname(), help="address of this node (default: its name)")

    for role, text in (("trainer", "run this node's trainer ranks"), ("rollout", "run this node's rollout workers")):
        part = _add_part(parts, role, text, _step)
        part.add_argument("--node", type=int, metavar="N", help="number of this node, from 0 (default: SLURM_NODEID)")
        _add_stub_command(part)
        part.set_defaults(role=role)

    _add_part(parts, "stacks", "dump the stacks of every process of a job to its log", _stacks)

    stop = _add_part(parts, "stop", "end a job after its current update, with a checkpoint", _stop)
    mode = stop.add_mutually_exclusive_group()
    mode.add_argument("--failed", metavar="REASON", help="end it at once with the outcome failed")
    mode.add_argument("--lost", metavar="REASON", help="the same, and requeue it: another launch may succeed")
    mode.add_argument("--preempted", action="store_true", help="end it with the outcome preempted, to be requeued")


def _add_evaluation(parts: Any) -> None:
    prepare = parts.add_parser(
        "prepare-eval", help="check an evaluation and make the run's folder; prints the path of its config.yaml"
    )
    add_evaluation_arguments(prepare)
    prepare.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of the job (default: 1)")
    prepare.add_argument("--dry-run", action="store_true", help="print every process with its command, make nothing")
    _add_stub_command(prepare)
    prepare.set_defaults(run=_prepare_evaluation)
    _add_part(parts, "convert", "convert the checkpoint of an evaluation for the engines, if needed", _convert)


def _stacks(options: argparse.Namespace) -> int:
    from megatron_webrl.launch.watchdog import request_stack_dump

    config = parse_config(options.config)
    request_stack_dump(config.run_folder, "requested by the user")
    sys.stdout.write(f"requested; the stacks appear within seconds in {config.run_folder / 'logs'}\n")
    return 0


def _add_part(parts: Any, name: str, text: str, run: Any) -> argparse.ArgumentParser:
    part: argparse.ArgumentParser = parts.add_parser(name, help=text)
    part.add_argument("config", type=Path, help="config.yaml in the run's folder, as `prepare` made it")
    part.set_defaults(run=run)
    return part


def _add_stub_command(part: argparse.ArgumentParser) -> None:
    part.add_argument("--stub-command", default="", metavar="COMMAND", help="run COMMAND instead of webrl as each role")


def _prepare(options: argparse.Namespace) -> int:
    from megatron_webrl.launch.slurm.prepare import prepare_job, resume_overrides
    from megatron_webrl.launch.validation import parse_training_config

    overrides = _overrides(options)
    overrides += resume_overrides(options.config, overrides, os.environ)
    config = parse_training_config(options.config, overrides)
    sys.stdout.write(f"{prepare_job(config, bool(options.stub_command), _report, os.environ)}\n")
    return 0


def _commands(options: argparse.Namespace) -> int:
    from megatron_webrl.launch.slurm.prepare import describe_processes

    config = parse_config(options.config, _overrides(options))
    sys.stdout.write("\n".join(describe_processes(config, options.stub_command)) + "\n")
    return 0


def _prepare_evaluation(options: argparse.Namespace) -> int:
    from megatron_webrl.launch import evaluation

    checkpoint = evaluation.EvaluatedCheckpoint.resolve(options.checkpoint)
    config = evaluation.parse_evaluation_config(checkpoint, evaluation_arguments(options), options.nodes)
    evaluation.check_output_file(options.json)
    job = evaluation.EvaluationJob(checkpoint, options.json and options.json.absolute())
    if options.dry_run:
        lines = evaluation.describe_evaluation(config, job, options.stub_command)
    else:
        stubbed = bool(options.stub_command)
        lines = [str(evaluation.prepare_evaluation(config, job, stubbed, _report, os.environ))]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from megatron_webrl.launch.evaluation import convert_checkpoint

    config = parse_config(options.config)
    with _locked_launch(config) as launch:
        convert_checkpoint(config, launch)
    return 0


def _report(message: str) -> None:
    sys.stderr.write(f"job: {message}\n")


def _overrides(options: argparse.Namespace) -> list[str]:
    from megatron_webrl.launch.slurm.prepare import browser_server_overrides

    return options.overrides + (browser_server_overrides(options.servers) if options.servers else [])


def _browsers(options: argparse.Namespace) -> int:
    """Serve at the one of the addresses --servers that this machine has, until SIGTERM. The token comes from the
    environment.
    """
    from megatron_webrl.browser.server.server_main import run_server

    addresses = parse_server_addresses(options.servers)
    sessions = sessions_per_server(parse_config(options.config, options.overrides), len(addresses))
    return run_server(options.config, options.overrides, own_listen_address(addresses), sessions, die_with_parent=True)


def sessions_per_server(config: Config, servers: int) -> int:
    """Sessions per browser server if `servers` of them serve all episodes that the workers run at a time."""
    return math.ceil(config.sessions_per_worker * config.rollout.engines / servers)


def own_listen_address(addresses: tuple[str, ...]) -> ListenAddress:
    """The first of several addresses that is this machine's. Raises ConfigError if none is."""
    from megatron_webrl.control.http.http_service import ListenAddress

    for address in addresses:
        parts = urlsplit(address)
        host = parts.hostname or ""
        try:
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError:
            continue  # another machine's
        return ListenAddress(host, parts.port or 80)
    raise ConfigError(
        f"--servers={','.join(addresses)} has no address of this machine; give one such as http://node7:8700"
    )


def _choose(options: argparse.Namespace) -> int:
    from megatron_webrl.launch.slurm.prepare import TooFewNodes, bad_nodes, choose_nodes

    config = parse_config(options.config)
    bad = {} if options.unchecked else bad_nodes(config, options.nodes)
    for node, reason in bad.items():
        sys.stderr.write(f"job: excluding {node}: {reason}\n")
    try:
        sys.stdout.write(f"{' '.join(choose_nodes(config, options.nodes, bad))}\n")
    except TooFewNodes as error:
        sys.stderr.write(f"webrl: {error}\n")
        return TOO_FEW_NODES_EXIT_CODE
    return 0


def _control(options: argparse.Namespace) -> int:
    from megatron_webrl.launch.first_node import FirstNode
    from megatron_webrl.launch.output import LogOutput

    config = parse_config(options.config)
    launch = _locked_launch(config)
    if not config.evaluation.only:
        return FirstNode(config, read_placement(config), LogOutput(config), options.host).run_job(launch)
    from megatron_webrl.launch.evaluation import hosted_evaluation

    with hosted_evaluation(config) as evaluation:
        output = LogOutput(config, evaluation)
        return FirstNode(config, read_placement(config), output, options.host).run_job(launch)


def _locked_launch(config: Config) -> AbstractContextManager[Launch | None]:
    """The launch of this Slurm job, which holds the run's lock; None outside Slurm. Raises LaunchLost."""
    launch = launch_of_process(config.run_folder, os.environ)
    return nullcontext() if launch is None else launch.locked()


def _step(options: argparse.Namespace) -> int:
    from megatron_webrl.launch.node import Node

    config = parse_config(options.config)
    number = node_number(options.node, config, os.environ)
    address = wait_for_control_address(control_address_path(config), config.run.startup_timeout_seconds)
    return Node(config, number).run_step(read_placement(config), options.role, address.host, options.stub_command)


def _stop(options: argparse.Namespace) -> int:
    from megatron_webrl.control.client import ControlClient
    from megatron_webrl.control.connection import JobFailed
    from megatron_webrl.types import PREEMPTED, STOPPED, failed_outcome

    config = parse_config(options.config)
    seconds = config.run.startup_timeout_seconds if options.preempted else 1.0  # may be pre-empted while starting
    try:
        wait_for_control_address(control_address_path(config), seconds)
        control = ControlClient(control_address_path(config), "stop", STOP_SECONDS, STOP_SECONDS)
    except (RoleStartError, JobFailed) as error:
        sys.stderr.write(f"webrl node stop: {error}\n")
        return 1
    if reason := options.failed or options.lost:
        control.end_job(failed_outcome(reason, infrastructure=bool(options.lost)))
    else:
        control.request_stop(PREEMPTED if options.preempted else STOPPED)
    return 0


def node_number(option: int | None, config: Config, environment: Mapping[str, str]) -> int:
    """The number of this node: --node, else SLURM_NODEID of a step on cluster.nodes nodes. Raises ConfigError."""
    nodes = config.cluster.nodes
    if option is None:
        step_nodes = environment.get("SLURM_STEP_NUM_NODES")
        if "SLURM_NODEID" not in environment or step_nodes is None:
            raise ConfigError("not in a Slurm step (SLURM_NODEID, SLURM_STEP_NUM_NODES are not set); give --node N")
        if int(step_nodes) != nodes:
            raise ConfigError(f"the step has {step_nodes} nodes, but cluster.nodes={nodes}; start it on as many")
        option = int(environment["SLURM_NODEID"])
    if not 0 <= option < nodes:
        raise ConfigError(f"--node={option} is not one of the {nodes} nodes of the placement (cluster.nodes), from 0")
    return option
