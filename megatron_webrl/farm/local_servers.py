"""Nodes of this process' own: child processes on loopback that end with it.

Who needs browsers on its own machine uses the same nodes, and the same client, as who uses a farm.
"""

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

START_TIMEOUT_SECONDS = 120.0  # for a node to be up
SHUTDOWN_TIMEOUT_SECONDS = 30.0  # for a node to end by itself: it closes Chromium, which has limits of its own
STABLE_SECONDS = 60.0  # a node that was up for so long has not ended "in a row"
MAX_RESTARTS = 3  # in a row
POLL_SECONDS = 0.05


@dataclass
class _Node:
    """One process, and its place in time."""

    name: str
    log: Path
    address_file: Path
    process: subprocess.Popen[bytes]
    started: float
    url: str | None = None  # once it is up
    proven: bool = False  # has been up in this or an earlier life
    failures: int = 0  # in a row


class LocalServers:
    """Life: start -> up -> close. `tend` notices nodes that have ended, and starts them again."""

    def __init__(self, config: Config, sessions: int, log_folder: Path | None = None, name: str = "browsers") -> None:
        """`sessions` are shared out over browser.processes nodes with the settings of `config`.

        Their logs are `logs`/<name>-<number>.log, or temporary files.
        """
        self.token = secrets.token_urlsafe(32)
        count = min(config.browser.processes, sessions)
        self._config, self._name, self._logs = config, name, log_folder
        self._places = [sessions // count + (number < sessions % count) for number in range(count)]
        self._scratch: Path | None = None
        self._nodes: list[_Node] = []

    def start(self) -> None:
        """Start the processes, from the main thread, which they do not outlive. Raises ProcessError."""
        self._scratch = child_process.make_scratch_folder()
        save_config(self._config, self._scratch / "config.yaml")
        for number, places in enumerate(self._places):
            name = f"{self._name}-{number}"
            log_file = (self._logs or self._scratch) / f"{name}.log"
            address_file = self._scratch / f"{name}.json"
            process = self._run(name, places, log_file, address_file)
            self._nodes.append(_Node(name, log_file, address_file, process, time.monotonic()))

    def addresses(self) -> list[str]:
        """Of the nodes that are up."""
        return [node.url for node in self._nodes if node.url is not None]

    def poll_addresses(self) -> list[str]:
        """The same after `tend`: what `Browsers` is told where everything is in one thread."""
        self.poll()
        return self.addresses()

    def poll(self) -> None:
        """Notice which nodes are up; start again those that have ended. From the main thread.

        Raises ProcessError for one that never came up, or ended too often in a row.
        """
        for number, node in enumerate(self._nodes):
            if (code := node.process.poll()) is not None:
                self._restart(node, self._places[number], child_process.describe_exit(code))
            elif node.url is None:
                self._look_for(node)
            elif node.failures and time.monotonic() > node.started + STABLE_SECONDS:
                node.failures = 0

    async def wait_until_ready(self) -> None:
        """Wait until every node is up. Raises ProcessError."""
        while len(self.poll_addresses()) < len(self._nodes):
            await asyncio.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the processes, within a limit, and remove their files. A second call does nothing."""
        for node in self._nodes:
            node.process.terminate()
        deadline = time.monotonic() + SHUTDOWN_TIMEOUT_SECONDS
        for node in self._nodes:
            child_process.terminate_tree(node.process, max(0.1, deadline - time.monotonic()))
        self._nodes = []
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def _look_for(self, node: _Node) -> None:
        if node.address_file.is_file():
            node.url, node.proven = str(json.loads(node.address_file.read_text())["url"]), True
            log.info("%s is up at %s", node.name, node.url)
        elif time.monotonic() > node.started + START_TIMEOUT_SECONDS:
            raise ProcessError(
                f"{node.name} did not come up within {START_TIMEOUT_SECONDS:.0f} s; last log line: "
                f"{child_process.last_log_line(node.log)} (log: {node.log})"
            )

    def _restart(self, node: _Node, places: int, how: str) -> None:
        """Another process in place of one that has ended, and whose sessions are lost with it."""
        failure = f"{node.name} {how}; last log line: {child_process.last_log_line(node.log)} (log: {node.log})"
        node.url = None
        node.failures += 1
        if not node.proven or node.failures > MAX_RESTARTS:
            often = f", {node.failures} times in a row" if node.proven else ""
            raise ProcessError(f"{failure}{often}")
        log.warning("%s; starting it again", failure)
        child_process.kill_process_group(node.process.pid)  # it led one of its own
        node.address_file.unlink(missing_ok=True)
        node.process, node.started = self._run(node.name, places, node.log, node.address_file), time.monotonic()

    def _run(self, name: str, places: int, log_file: Path, address_file: Path) -> subprocess.Popen[bytes]:
        assert self._scratch is not None
        command = [
            sys.executable, "-m", "megatron_webrl.cli", "browsers", "serve",
            str(self._scratch / "config.yaml"), "--host", "127.0.0.1", "--port", "0", "--sessions", str(places),
            "--address-file", str(address_file), "--die-with-parent",
        ]  # fmt: skip
        environment = {**os.environ, TOKEN_VARIABLE: self.token, "TMPDIR": str(self._scratch)}
        return child_process.start_process(command, log_file, environment, name)


@asynccontextmanager
async def local_servers(
    config: Config, sessions: int, log_folder: Path | None = None, name: str = "browsers"
) -> AsyncIterator[LocalServers]:
    """Nodes that are up, for as long as the context. Raises ProcessError."""
    nodes = LocalServers(config, sessions, log_folder, name)
    try:
        nodes.start()
        await nodes.wait_until_ready()
        yield nodes
    finally:
        await asyncio.to_thread(nodes.close)
