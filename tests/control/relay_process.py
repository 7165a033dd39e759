"""A relay in a process of its own, as in the supervisor of a node, which tests kill and stop."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import started

RELAY = """
import signal, sys
from pathlib import Path
from megatron_webrl.control.relay import start_relay
print(start_relay(Path(sys.argv[1]), "node-0"), flush=True)
signal.pause()
"""
ROLE = """
import signal, sys
from pathlib import Path
from megatron_webrl.control.client import ControlClient
ControlClient(Path(sys.argv[1]), sys.argv[2], relay_port=int(sys.argv[3])).start_heartbeat()
print("started", flush=True)
signal.pause()
"""


@dataclass
class RelayProcess:
    process: subprocess.Popen[str]
    port: int


@contextmanager
def relay_process(address: Path) -> Iterator[RelayProcess]:
    """A running relay; killed at the end."""
    with started([sys.executable, "-c", RELAY, str(address)]) as process:
        assert process.stdout is not None
        yield RelayProcess(process, int(process.stdout.readline()))


@contextmanager
def role_process(address: Path, role: str, relay_port: int) -> Iterator[subprocess.Popen[str]]:
    """A role that sends heartbeats and does nothing else; killed at the end."""
    with started([sys.executable, "-c", ROLE, str(address), role, str(relay_port)]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process
