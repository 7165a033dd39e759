"""The pages of a run while its job runs on this machine: `webrl monitor` as one more process, which no role needs.

It is not among the supervised roles: the job continues without it, and ends it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import ProcessError
from megatron_webrl.launch import roles
from megatron_webrl.monitor.command import TOKEN_VARIABLE

HOST = "127.0.0.1"
ADDRESS_FILE, LOG = "monitor.json", "logs/monitor.log"  # of the run's folder


class JobMonitor:
    """Life cycle: made by `start`, then `poll` until the job ends."""

    def __init__(self, process: child_process.ChildProcess, console: Console, address_file: Path, token: str) -> None:
        self.process, self._console, self._file, self._token = process, console, address_file, token
        self._announced = False

    @classmethod
    def start(cls, config: Config, scratch: Path, console: Console) -> JobMonitor | None:
        """Start the process; None for a job without pages, or if nobody can know their token.

        A random token is shown on a terminal only. `scratch`: TMPDIR of the process.
        """
        token = os.environ.get(TOKEN_VARIABLE) or (secrets.token_urlsafe(24) if console.is_terminal else "")
        if not config.tracking.monitor_port or not token:
            return None
        file = config.run_folder / ADDRESS_FILE
        file.unlink(missing_ok=True)
        port = config.tracking.monitor_port if _is_free(config.tracking.monitor_port) else 0
        arguments = ["monitor", str(config.run_folder), "--host", HOST, "--port", str(port)]
        command, log = roles.webrl_command([*arguments, "--address-file", str(file)]), config.run_folder / LOG
        environment = roles.role_environment(config, "monitor", scratch) | {TOKEN_VARIABLE: token}
        with suppress(ProcessError):  # the job needs every process but this one
            return cls(child_process.start_process(command, log, environment, "monitor"), console, file, token)
        return None

    def poll(self) -> None:
        """Print once where the pages are, or why there are none."""
        if self._announced:
            return
        line = ""
        if self.process.poll() is not None:
            line = f"no pages of this job: the monitor {self.process.describe_end()} (log: {self.process.log})"
        with suppress(OSError, ValueError):
            url = json.loads(self._file.read_text())["url"]
            secret = f"/?token={self._token}" if self._console.is_terminal else f" (token: {TOKEN_VARIABLE})"
            line = line or f"monitor: {url}{secret}"
        if line:
            self._announced = True
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
