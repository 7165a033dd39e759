"""The pages of a run while its job runs on this machine: `webrl monitor` as one more process, which no role needs.

It is not among the supervised roles: the job continues without it, and ends it.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.launch import role_process
from megatron_webrl.monitor.command import TOKEN_VARIABLE
from megatron_webrl.util import child_process
from megatron_webrl.util.child_process import ChildProcess, ProcessError

HOST = "127.0.0.1"
ADDRESS_FILE = "monitor.json"  # of the run's folder


def can_be_opened(config: Config, to_terminal: bool) -> bool:
    """Whether the job serves pages, whose token somebody can know: a random one is shown on a terminal only."""
    return bool(config.tracking.monitor_port) and (to_terminal or TOKEN_VARIABLE in os.environ)


class JobMonitor:
    """Life cycle: made, which starts the process, then `poll` until the job ends."""

    def __init__(self, config: Config, scratch: Path) -> None:
        """`scratch`: TMPDIR of the process. The token is that of WEBRL_MONITOR_TOKEN, else random."""
        self._log = config.run_folder / "logs" / "monitor.log"
        self._file = config.run_folder / ADDRESS_FILE
        self._file.unlink(missing_ok=True)
        self._token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        self._announced = False
        port = config.tracking.monitor_port if _is_free(config.tracking.monitor_port) else 0
        arguments = ["monitor", str(config.run_folder), "--host", HOST, "--port", str(port)]
        command = role_process.webrl_command([*arguments, "--address-file", str(self._file)])
        environment = role_process.role_environment(config, "monitor", scratch) | {TOKEN_VARIABLE: self._token}
        self.process: ChildProcess | None = None
        try:
            self.process = child_process.start_process(command, self._log, environment, "monitor", (), ())
        except ProcessError:
            self._announced = True  # the job needs every process but this one

    def poll(self, to_terminal: bool) -> str:
        """Once, where the pages are, or why there are none; empty otherwise. The token is for a terminal only."""
        if self._announced or self.process is None:
            return ""
        if self.process.poll() is not None:
            self._announced = True
            return f"no pages of this job: the monitor {self.process.describe_end()} (log: {self._log})"
        try:
            url = json.loads(self._file.read_text())["url"]
        except (OSError, ValueError):
            return ""
        self._announced = True
        return f"monitor: {url}/?token={self._token}" if to_terminal else f"monitor: {url} (token: {TOKEN_VARIABLE})"


def _is_free(port: int) -> bool:
    try:
        socket.create_server((HOST, port)).close()
    except OSError:
        return False
    return True
