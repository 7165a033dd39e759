"""Browser servers as child processes on loopback, which end with their parent; local browsers are used like a farm."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.farm.protocol import TOKEN_VARIABLE
from megatron_webrl.system import child_process
from megatron_webrl.system.child_process import ProcessError

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 120.0
SHUTDOWN_TIMEOUT_SECONDS = 30.0  # a server closes Chromium, which has timeouts of its own
STABLE_SECONDS = 60.0  # uptime that resets the count of failures in a row
MAX_RESTARTS = 3  # in a row
POLL_SECONDS = 0.05


@dataclass
class _Server:
    """One server process and its history."""

    name: str
    log: Path
    address_file: Path
    process: subprocess.Popen[bytes]
    started: float
    url: str | None = None  # once it is ready
    was_ready: bool = False  # at any time, before restarts too
    failures: int = 0  # in a row


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
        for number, sessions in enumerate(self._sessions):
            name = f"{self._name}-{number}"
            log_file = (self._log_folder or self._scratch) / f"{name}.log"
            address_file = self._scratch / f"{name}.json"
            process = self._run(name, sessions, log_file, address_file)
            self._servers.append(_Server(name, log_file, address_file, process, time.monotonic()))

    def addresses(self) -> list[str]:
        """URLs of the servers that are ready."""
        return [server.url for server in self._servers if server.url is not None]

    def poll_addresses(self) -> list[str]:
        """`poll`, then `addresses`: an AddressProvider for single-threaded callers."""
        self.poll()
        return self.addresses()

    def poll(self) -> None:
        """Detect servers that are ready and restart those that have ended. Call from the main thread. Raises
        ProcessError for a server that never became ready or failed more than MAX_RESTARTS times in a row.
        """
        for number, server in enumerate(self._servers):
            if (code := server.process.poll()) is not None:
                self._restart(server, self._sessions[number], child_process.describe_exit(code))
            elif server.url is None:
                self._check_ready(server)
            elif server.failures and time.monotonic() > server.started + STABLE_SECONDS:
                server.failures = 0

    async def wait_until_ready(self) -> None:
        """Wait until every server is ready. Raises ProcessError."""
        while len(self.poll_addresses()) < len(self._servers):
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the processes, within a timeout, and remove their files. A second call does nothing."""
        for server in self._servers:
            server.process.terminate()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        for server in self._servers:
            child_process.terminate_tree(server.process, max(0.1, deadline - time.monotonic()))
        self._servers = []
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _check_ready(self, server: _Server) -> None:
        if server.address_file.is_file():
            server.url, server.was_ready = str(json.loads(server.address_file.read_text())["url"]), True
            log.info("%s is ready at %s", server.name, server.url)
        elif time.monotonic() > server.started + START_TIMEOUT_SECONDS:
            raise ProcessError(
                f"{server.name} was not ready within {START_TIMEOUT_SECONDS:.0f} s; last log line: "
                f"{child_process.last_log_line(server.log)} (log: {server.log})"
            )

    def _restart(self, server: _Server, sessions: int, how: str) -> None:
        """Replace a process that has ended; its sessions are lost."""
        failure = f"{server.name} {how}; last log line: {child_process.last_log_line(server.log)} (log: {server.log})"
        server.url = None
        server.failures += 1
        if not server.was_ready or server.failures > MAX_RESTARTS:
            count = f", {server.failures} times in a row" if server.was_ready else ""
            raise ProcessError(f"{failure}{count}")
        log.warning("%s; restarting it", failure)
        child_process.kill_process_group(server.process.pid)  # its remaining children
        server.address_file.unlink(missing_ok=True)
        server.process, server.started = (
            self._run(server.name, sessions, server.log, server.address_file),
            time.monotonic(),
        )

    def _run(self, name: str, sessions: int, log_file: Path, address_file: Path) -> subprocess.Popen[bytes]:
        assert self._scratch is not None
        command = [
            sys.executable, "-m", "megatron_webrl.cli", "browsers", "serve",
            str(self._scratch / "config.yaml"), "--host", "127.0.0.1", "--port", "0", "--sessions", str(sessions),
            "--address-file", str(address_file), "--die-with-parent",
        ]  # fmt: skip
        environment = {**os.environ, TOKEN_VARIABLE: self.token, "TMPDIR": str(self._scratch)}
        return child_process.start_process(command, log_file, environment, name)


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
