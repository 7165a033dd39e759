"""A control plane in a thread, for tests of its clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_webrl.control.control_plane import ControlClient, serve


@contextmanager
def control_plane(folder: Path, seconds: float = 300.0) -> Iterator[tuple[str, int]]:
    """Serve a control plane within the context; yields its address."""
    path = folder / "control.json"
    path.unlink(missing_ok=True)
    thread = threading.Thread(target=serve, args=("127.0.0.1", 0, "ring", path, seconds), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not path.is_file():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    fields = json.loads(path.read_text())
    address = fields["host"], fields["port"]
    yield address
    last = connect(address, "test")
    last.end_job("finished")
    last.shutdown()
    thread.join(60)


def connect(address: tuple[str, int], role: str) -> ControlClient:
    """Connect as a role."""
    return ControlClient(*address, role, heartbeat_timeout_seconds=60.0, connect_seconds=60.0)
