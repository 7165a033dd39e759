"""`webrl role`: one process of a job, which reads configuration, placement and control address from the run's folder.

It imports the packages of its own role only: a trainer no vLLM, a worker no Megatron, the control service neither.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import collect_garbage
from megatron_webrl.types import failed_outcome
from megatron_webrl.util.disk_faults import INFRASTRUCTURE_EXIT_CODE, is_file_system_failure
from megatron_webrl.util.text import configure_logging, first_line, printable, redact

if TYPE_CHECKING:
    from megatron_webrl.control.client import ControlClient
    from megatron_webrl.placement.placement import Placement, ProcessPlacement
    from megatron_webrl.ring.ring import NodeRing

log = logging.getLogger(__name__)

CONTROL = "control"


def main(arguments: Sequence[str]) -> int:
    """Run `webrl role`, without the parsers of all other commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog="webrl")
    add_role(parser.add_subparsers())
    return run_command(parser.parse_args(["role", *arguments]))


def run_command(options: argparse.Namespace) -> int:
    """Run a parsed command; returns the exit code."""
    child_process.register_dump_signal()
    os.umask(os.umask(0o077) | 0o077)  # runs and results are their owner's: pages, logs and episodes may be private
    try:
        return options.run(options)
    except ConfigError as error:
        sys.stderr.write(f"webrl: {printable(redact(str(error)))}\n")
        return 2


def add_role(commands: Any) -> None:
    """Add `webrl role` to the parser."""
    parser = commands.add_parser("role", help="one process of a job, which `train` and the Slurm scripts start")
    parser.add_argument(
        "folder", type=Path, metavar="RUN", help="folder of the run, with config.yaml and placement.json"
    )
    parser.add_argument("name", metavar="NAME", help="control, trainer-N, rollout-N or rollout-N.follower-N")
    parser.add_argument(
        "--attempt", type=int, default=0, metavar="N", help="earlier attempts of the trainer in this job"
    )
    parser.add_argument("--weights-only", action="store_true", help="only send or receive weights")
    parser.add_argument("--host", default="127.0.0.1", help="control: address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=0, help="control: port to listen on (default: 0, any free one)")
    parser.add_argument("--journal", type=Path, help="control: file from which it continues if started again")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run a role; returns the exit code. Raises ConfigError for one that the placement does not have."""
    faulthandler.enable()
    configure_logging(options.name)
    config = parse_config(options.folder / "config.yaml")
    if options.name == CONTROL:
        return _run_control(config, options)
    from megatron_webrl.placement.placement import Placement

    placement = Placement.from_json(json.loads((options.folder / "placement.json").read_text()))
    process = next((each for each in placement.processes if each.name == options.name), None)
    if process is None:
        raise ConfigError(f"{options.name} is not a process of {options.folder / 'placement.json'}, nor {CONTROL}")
    return _run_in_job(config, placement, process, options)


def _run_control(config: Config, options: argparse.Namespace) -> int:
    from megatron_webrl.control.journal import DAMAGED_EXIT_CODE, JournalError
    from megatron_webrl.control.server import serve
    from megatron_webrl.ring.segment import segment_name

    if options.journal is None:
        raise ConfigError("--journal is missing: a control service that is started again continues from it")
    job_id = segment_name(config.run.name, secrets.token_hex(4))
    address_file, timeout_seconds = options.folder / "control.json", config.run.heartbeat_timeout_seconds
    try:
        serve(options.host, options.port, job_id, address_file, options.journal, timeout_seconds)
    except JournalError as error:
        log.error("the journal is damaged: %s", error)
        return DAMAGED_EXIT_CODE
    return 0


def _run_in_job(config: Config, placement: Placement, process: ProcessPlacement, options: argparse.Namespace) -> int:
    """Run a trainer rank or rollout process; returns the exit code.

    JobFailed in a trainer rank ends the job with an error that names it. After other exceptions its node decides, if it
    restarts ranks; about a rollout process it always decides.
    """
    from megatron_webrl.control.client import ControlClient
    from megatron_webrl.control.connection import JobEnded, JobFailed
    from megatron_webrl.ring.ring import NodeRing

    control, is_rank = ControlClient(options.folder / "control.json", process.name), process.role == "trainer"
    # A job of one node has a ring with the name of the job, so that jobs of one name may run side by side.
    ring_name = placement.rings[process.node].name if placement.nodes > 1 and placement.rings else control.job_id
    ring = NodeRing(process.node, ring_name, control.job_id)
    gc.disable()  # collections of what imports keep are a fifth of their time
    try:
        if is_rank:
            _run_rank(config, control, ring, options)
        else:
            _run_rollout(config, placement, process, control, ring, options.weights_only)
    except JobEnded:
        log.info("the job has ended")
    except JobFailed as error:  # another role has ended the job and is named in the error, or a wait timed out
        log.error("%s", error)
        if is_rank:
            control.end_job(f"failed: {error}")
        return 1
    except Exception as error:
        log.exception("failed")
        message, infrastructure = f"{type(error).__name__}: {first_line(error)}", is_file_system_failure(error)
        if is_rank and (options.weights_only or not config.run.max_trainer_restarts):
            control.end_job(failed_outcome(f"{process.name}: {message}", infrastructure))
        log.error("%s", message)  # the last line of the log, which its node shows
        return INFRASTRUCTURE_EXIT_CODE if infrastructure else 1
    return 0


def _run_rank(config: Config, control: ControlClient, ring: NodeRing, options: argparse.Namespace) -> None:
    from megatron_webrl.model import platform
    from megatron_webrl.placement.placement import RankInfo

    platform.activate(config.model.platform)  # before Megatron is imported
    from megatron_webrl.trainer import main as training
    from megatron_webrl.trainer import weight_sync_check

    collect_garbage()
    rank = RankInfo.from_environment()
    if options.weights_only:
        weight_sync_check.run(config, control, rank, ring)
    else:
        training.run(config, control, rank, ring, options.attempt)


def _run_rollout(
    config: Config,
    placement: Placement,
    process: ProcessPlacement,
    control: ControlClient,
    ring: NodeRing,
    weights_only: bool,
) -> None:
    from megatron_webrl.rollout import main as working
    from megatron_webrl.rollout.engine import followers

    collect_garbage()
    nodes = [each.node for each in placement.of_role("rollout") if each.index == process.index]
    if process.follower:
        followers.run(config, control, process.index, process.follower, len(nodes), ring)
    else:
        working.run(config, control, process.index, ring, nodes, weights_only)
