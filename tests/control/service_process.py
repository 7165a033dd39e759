"""A control service in a process of its own, which tests kill, stop and start again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.control.client import ControlClient

FREQUENT_HEARTBEATS = "from megatron_webrl.control import facts; facts.HEARTBEAT_SECONDS = 0.2"
PROGRAM = """
import logging, sys
from pathlib import Path
from megatron_webrl.control import server
logging.basicConfig(level=logging.INFO)
{before}
folder = Path(sys.argv[1])
server.serve("127.0.0.1", 0, "job", folder / "control.json", folder / "journal", float(sys.argv[2]))
"""


@dataclass
class ServiceProcess:
    folder: Path
    heartbeat_timeout_seconds: float
    before: str = ""  # statements before the service starts
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> Path:
        return self.folder / "control.json"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def start(self) -> None:
        """Start the service, again if it was killed, and wait until it answers."""
        program = PROGRAM.format(before=self.before)
        with (self.folder / "log").open("ab") as log:
            arguments = [str(self.folder), str(self.heartbeat_timeout_seconds)]
            self.process = subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=log)
        self.connect("starter")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def has_exited(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def connect(self, role: str, lost_seconds: float = 60.0) -> ControlClient:
        return ControlClient(self.address, role, lost_seconds=lost_seconds)


@contextmanager
def service_process(
    folder: Path, heartbeat_timeout_seconds: float = 10.0, before: str = ""
) -> Iterator[ServiceProcess]:
    """A running service; killed at the end."""
    service = ServiceProcess(folder, heartbeat_timeout_seconds, before)
    try:
        service.start()
        yield service
    finally:
        if service.process is not None:
            service.kill()
