"""Where the control service of a job listens, and its token: a file in the run's folder that only its user can read."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.util import atomic_file

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
        atomic_file.write_json(path, asdict(self), mode=0o600)

    @property
    def is_loopback(self) -> bool:
        """Whether the address can be reached only from the machine itself."""
        return self.host.startswith("127.") or self.host in ("localhost", "::1")
