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
from megatron_webrl.launch import roles
from megatron_webrl.monitor.command import TOKEN_VARIABLE
from megatron_webrl.util import child_process
from megatron_webrl.util.child_process import ProcessError

HOST = "127.0.0.1"
ADDRESS_FILE = "monitor.json"  # of the run's folder


class JobMonitor:
    """Life cycle: made by `start`, then `poll` until the job ends."""

    @classmethod
    def start(cls, config: Config, scratch: Path, console: Console) -> JobMonitor | None:
        """Start the process; None for a job without pages, or if nobody can know their token.

        A random token is shown on a terminal only. `scratch`: TMPDIR of the process.
        """
        token = os.environ.get(TOKEN_VARIABLE) or (secrets.token_urlsafe(24) if console.is_terminal else "")
        if not config.tracking.monitor_port or not token:
            return None
        with suppress(ProcessError):  # the job needs every process but this one
            return cls(config, scratch, console, token)
        return None

    def __init__(self, config: Config, scratch: Path, console: Console, token: str) -> None:
        self._console, self._token, self._announced = console, token, False
        self._log, self._file = config.run_folder / "logs" / "monitor.log", config.run_folder / ADDRESS_FILE
        self._file.unlink(missing_ok=True)
        port = config.tracking.monitor_port if _is_free(config.tracking.monitor_port) else 0
        arguments = ["monitor", str(config.run_folder), "--host", HOST, "--port", str(port)]
        command = roles.webrl_command([*arguments, "--address-file", str(self._file)])
        environment = roles.role_environment(config, "monitor", scratch) | {TOKEN_VARIABLE: token}
        self.process = child_process.start_process(command, self._log, environment, "monitor", (), ())

    def poll(self) -> None:
        """Print once where the pages are, or why there are none."""
        if self._announced:
            return
        if self.process.poll() is not None:
            self._print(f"no pages of this job: the monitor {self.process.describe_end()} (log: {self._log})")
            return
        with suppress(OSError, ValueError):
            url = json.loads(self._file.read_text())["url"]
            secret = f"/?token={self._token}" if self._console.is_terminal else f" (token: {TOKEN_VARIABLE})"
            self._print(f"monitor: {url}{secret}")

    def _print(self, line: str) -> None:
        self._announced = True
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
