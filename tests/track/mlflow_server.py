"""A real MLflow server in a process of its own, which can be stopped and started again; an address that swallows."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.control.child_process import die_with_parent
from tests.waiting import until

START_SECONDS = 120.0


@dataclass
class MLflowServer:
    """An MLflow server with its database in a folder. Life cycle: start, any of pause and resume, stop; again."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}",
            "--artifacts-destination", str(self.folder / "artifacts"),
        ]  # fmt: skip
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
        with (self.folder / "server.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=die_with_parent,
                env={**environment, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )  # fmt: skip
        until(self._answers, lambda: (self.folder / "server.log").read_text(), START_SECONDS)

    def pause(self) -> None:
        """SIGSTOP to all its processes: connections are accepted by the kernel, and nobody answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None:
            self._signal(signal.SIGKILL)
            self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "server.log").read_text()
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200
        except OSError:
            return False


@contextmanager
def mlflow_server(folder: Path, start: bool = True) -> Iterator[MLflowServer]:
    """A server in a new `folder`."""
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        server = MLflowServer(folder, probe.getsockname()[1])
    try:
        if start:
            server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def black_hole() -> Iterator[str]:
    """An HTTP address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
