"""Where the control service of a job listens, and its token: a file in the run's folder that only its user can read."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "control.json"


@dataclass(frozen=True)
class ControlAddress:
    """Address of a control service, from control.json."""

    host: str
    port: int
    pid: int
    job_id: str
    token: str  # that every request must carry

    @classmethod
    def read(cls, path: Path) -> ControlAddress | None:
        """Read the file; None without a valid one."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            fields = json.loads(path.read_text())
            return cls(fields["host"], int(fields["port"]), int(fields["pid"]), fields["job_id"], fields["token"])
        return None

    def write(self, path: Path) -> None:
        """Write the file atomically, for its user only."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)

    @property
    def is_loopback(self) -> bool:
        """Whether the address can be reached only from the machine itself."""
        return self.host.startswith("127.") or self.host in ("localhost", "::1")
