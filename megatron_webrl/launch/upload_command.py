"""The command line of `webrl upload`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.launch.run_folder import check_ended
from megatron_webrl.monitor.status import find_run
from megatron_webrl.track.upload import Uploader, make_uploaders
from megatron_webrl.util.text import first_line


def add_upload(commands: Any) -> None:
    """Add `webrl upload` to the parser."""
    upload = commands.add_parser(
        "upload",
        help="send to MLflow, TensorBoard and W&B what a run could not send",
        description="Send what MLflow and the sinks of tracking.also have not received of a run's files, after its job "
        "has ended. It may be repeated. MLFLOW_TRACKING_URI names MLflow if the run's tracking.uri is empty. Exit code "
        "0: they have everything; 1: one does not answer; 2: there is no such run, or its job runs.",
        epilog="example: webrl upload runs/quickstart",
    )
    upload.add_argument("of", metavar="RUN", help="folder of a run, or the name of a run in runs/")
    upload.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    folder = find_run(options.of)
    config = parse_config(folder / "config.yaml")
    config.run.directory, config.run.name = str(folder.parent), folder.name  # a run may have been moved
    check_ended(config)
    return max([_send(uploader) for uploader in make_uploaders(config)])


def _send(uploader: Uploader) -> int:
    sink = f"{uploader.title} at {uploader.address}"
    try:
        uploader.send()
    except Exception as error:
        left = uploader.pending()
        sys.stderr.write(
            f"webrl: {sink}: {type(error).__name__}: {first_line(error)}; "
            f"{left} of {uploader.sent + left} entries wait for the next webrl upload\n"
        )
        return 1
    run = uploader.state.run_id or uploader.config.run.name
    sys.stdout.write(f"{sink} has run {run}: {uploader.sent} entries sent\n")
    return 0
