"""`webrl mlflow`: the web pages of MLflow over the store to which a run logs."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util.child_process import die_with_parent
from megatron_webrl.util.text import redact

HOST = "127.0.0.1"
ANSWER_SECONDS = 10.0
STOP_SECONDS = 5.0
SERVED = ("sqlite", "postgresql", "mysql", "mssql", "file", "")  # stores of which this machine can serve pages
LOCAL_MLFLOW = Path(".mlflow/bin/mlflow")
INSTALL = "python3 -m venv .mlflow && .mlflow/bin/pip install mlflow"


def add_mlflow(commands: Any) -> None:
    """Add `webrl mlflow` to the parser."""
    mlflow = commands.add_parser(
        "mlflow",
        help="browse the metrics of runs in MLflow",
        description="Start MLflow's web pages on 127.0.0.1, over the store to which a run logs (tracking.uri), until "
        "Ctrl-C, and print their address. They need the package mlflow, with its pages, where this environment has its "
        f"client only: {INSTALL}. Exit code 1: MLflow ended by itself; 2: bad input.",
        epilog="example: webrl mlflow quickstart",
    )
    mlflow.add_argument(
        "of",
        metavar="RUN",
        nargs="?",
        help="folder of a run, or the name of a run in runs/ (default: those in runs/)",
    )
    mlflow.add_argument("--port", type=int, default=5000, help="port to listen on (default: 5000)")
    mlflow.add_argument(
        "--mlflow", type=Path, metavar="PROGRAM",
        help=f"the mlflow program (default: that of this environment if it has the pages, else {LOCAL_MLFLOW})",
    )  # fmt: skip
    mlflow.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from megatron_webrl.control.http.http_service import run_process
    from megatron_webrl.monitor.status import find_run, read_config
    from megatron_webrl.track.mlflow_upload import run_id

    folder = None if options.of is None else find_run(options.of)
    uri = _store(parse_config(None, []) if folder is None else read_config(folder))
    command = [*_program(options.mlflow), "server", "--host", HOST, "--port", str(options.port), "--workers", "1"]
    try:
        socket.create_server((HOST, options.port)).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--port={options.port}: cannot listen on {HOST}:{options.port} ({error})") from None
    sys.stdout.write(f"MLflow over {redact(uri)}\n")
    sys.stdout.flush()
    shown = None if folder is None else run_id(folder)
    return run_process("mlflow", _serve(command, uri, options.port, shown), die_with_parent=False)


def _store(config: Config) -> str:
    """The address of the store. Raises ConfigError if it has pages of its own or does not exist."""
    uri = config.tracking_uri
    parts = urlsplit(uri)
    if parts.scheme.partition("+")[0] not in SERVED:
        raise ConfigError(f"tracking.uri={redact(uri)} is an MLflow server with pages of its own: open it in a browser")
    if parts.scheme == "sqlite" and not (path := Path(parts.path.removeprefix("/"))).is_file():
        raise ConfigError(f"tracking.uri={uri}: {path} does not exist; no run has logged to it")
    return uri


def _program(given: Path | None) -> Sequence[str]:
    """The command of an MLflow with pages. Raises ConfigError without one."""
    if given is not None:
        if (found := shutil.which(given)) is None:
            raise ConfigError(f"--mlflow={given} is not a program")
        return [found]
    spec = find_spec("mlflow")
    if spec is not None and spec.origin and (Path(spec.origin).parent / "server" / "js" / "build").is_dir():
        return [sys.executable, "-m", "mlflow"]
    if LOCAL_MLFLOW.is_file():
        return [str(LOCAL_MLFLOW.absolute())]
    raise ConfigError(f"this environment has MLflow's client without its pages; install them with: {INSTALL}")


async def _serve(command: Sequence[str], uri: str, port: int, run: str | None) -> int:
    """Run MLflow until it ends or this is cancelled. Its address may hold a password: it is no argument."""
    variables = {"MLFLOW_BACKEND_STORE_URI": uri, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    variables = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")} | variables
    process = await asyncio.create_subprocess_exec(
        *command, env=variables, start_new_session=True, stdin=asyncio.subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    announcing = asyncio.create_task(_announce(port, run))
    try:
        code = await process.wait()
        sys.stderr.write(f"webrl: {command[0]} ended with code {code}\n")
        return 1
    finally:
        announcing.cancel()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):  # what is left then is killed by run_process
            await asyncio.wait_for(process.wait(), STOP_SECONDS)


async def _announce(port: int, run: str | None) -> None:
    """Print the address, at the page of a run if MLflow has it, once MLflow answers."""
    while True:
        with suppress(OSError):
            await asyncio.to_thread(_get, port, "/health")
            break
        await asyncio.sleep(0.2)
    place = ""
    with suppress(OSError, ValueError, KeyError):
        if run is not None:
            content = json.loads(await asyncio.to_thread(_get, port, f"/api/2.0/mlflow/runs/get?run_id={run}"))
            place = f"#/experiments/{content['run']['info']['experiment_id']}/runs/{run}"
    sys.stdout.write(f"open http://{HOST}:{port}/{place}\n")
    sys.stdout.flush()


def _get(port: int, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=ANSWER_SECONDS) as answer:
        content: bytes = answer.read()
    return content
