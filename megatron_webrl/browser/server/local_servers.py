"""Browser servers as child processes on loopback, which end with their parent."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.browser.server.protocol import TOKEN_VARIABLE
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.control.child_process import ProcessError, RestartPolicy, SupervisedProcess

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 120.0
SHUTDOWN_TIMEOUT_SECONDS = 30.0  # a server closes Chromium, which has timeouts of its own
MAX_RESTARTS = 10  # of one server within an hour
POLL_SECONDS = 0.05


@dataclass
class _Server(SupervisedProcess):
    may_exit: bool = False
    url: str | None = None  # once it is ready
    was_ready: bool = False  # at any time, before restarts too


class LocalServers:
    """Life cycle: start -> wait_until_ready -> close. `poll` detects servers that have ended and restarts them."""

    def __init__(self, config: Config, sessions: int, log_folder: Path | None = None, name: str = "browsers") -> None:
        """Divide `sessions` among browser.processes servers. Logs: `log_folder`/<name>-<number>.log, else temporary."""
        self.token = secrets.token_urlsafe(32)
        count = min(config.browser.processes, sessions)
        self._config, self._name, self._log_folder = config, name, log_folder
        self._sessions = [sessions // count + (number < sessions % count) for number in range(count)]
        self._scratch: Path | None = None
        self._servers: list[_Server] = []

    def start(self) -> None:
        """Start the processes; call from the main thread, because they end with it. Raises ProcessError."""
        self._scratch = child_process.make_scratch_folder()
        save_config(self._config, self._scratch / "config.yaml")
        environment = {**os.environ, TOKEN_VARIABLE: self.token, "TMPDIR": str(self._scratch)}
        for number, sessions in enumerate(self._sessions):
            name = f"{self._name}-{number}"
            command, log = self._command(name, sessions), (self._log_folder or self._scratch) / f"{name}.log"
            server = _Server(name, command, environment, log, policy=RestartPolicy(MAX_RESTARTS))
            server.start()
            self._servers.append(server)

    def addresses(self) -> list[str]:
        """URLs of the servers that are ready."""
        return [server.url for server in self._servers if server.url is not None]

    def poll_addresses(self) -> list[str]:
        """`poll`, then `addresses`: an AddressProvider for single-threaded callers."""
        self.poll()
        return self.addresses()

    def poll(self) -> None:
        """Detect servers that are ready and restart those that have ended. Call from the main thread. Raises
        ProcessError for a server that never became ready or failed more than MAX_RESTARTS times within an hour.
        """
        for server in self._servers:
            if failure := server.poll_failure():
                self._schedule_restart(server, failure)
            elif not server.restart_if_due() and server.url is None and server.restart_at is None:
                self._check_ready(server)

    async def wait_until_ready(self) -> None:
        """Wait until every server is ready. Raises ProcessError."""
        while len(self.poll_addresses()) < len(self._servers):
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the processes, within a timeout, and remove their files. A second call does nothing."""
        processes = [server.process for server in self._servers]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        for process in processes:
            child_process.terminate_tree(process, max(0.1, deadline - time.monotonic()))
        self._servers = []
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _check_ready(self, server: _Server) -> None:
        address_file = self._address_file(server.name)
        if address_file.is_file():
            server.url, server.was_ready = str(json.loads(address_file.read_text())["url"]), True
            log.info("%s is ready at %s", server.name, server.url)
        elif time.monotonic() > server.started_at + START_TIMEOUT_SECONDS:
            raise ProcessError(
                f"{server.name} was not ready within {START_TIMEOUT_SECONDS:.0f} s; last log line: "
                f"{server.process.last_line()} (log: {server.log})"
            )

    def _schedule_restart(self, server: _Server, failure: str) -> None:
        """Replace a process that has ended; its sessions are lost."""
        server.url = None
        if not server.was_ready:
            raise ProcessError(failure)
        if not server.schedule_restart():
            raise ProcessError(f"{failure}, after {MAX_RESTARTS} restarts within an hour")
        log.warning("%s; restarting it (restart %d of %d within an hour)", failure, server.policy.used, MAX_RESTARTS)
        self._address_file(server.name).unlink(missing_ok=True)

    def _address_file(self, name: str) -> Path:
        assert self._scratch is not None
        return self._scratch / f"{name}.json"

    def _command(self, name: str, sessions: int) -> list[str]:
        address_file = self._address_file(name)
        return [
            sys.executable, "-m", "megatron_webrl", "browsers", "serve", str(address_file.with_name("config.yaml")),
            "--host", "127.0.0.1", "--port", "0", "--sessions", str(sessions), "--address-file", str(address_file),
            "--die-with-parent",
        ]  # fmt: skip


@asynccontextmanager
async def local_servers(
    config: Config, sessions: int, log_folder: Path | None = None, name: str = "browsers"
) -> AsyncIterator[LocalServers]:
    """Servers that are ready, until the context ends. Raises ProcessError."""
    servers = LocalServers(config, sessions, log_folder, name)
    try:
        servers.start()
        await servers.wait_until_ready()
        yield servers
    finally:
        await asyncio.to_thread(servers.close)
