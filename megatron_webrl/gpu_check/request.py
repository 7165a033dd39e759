"""What a user asks of the check; every section's process reads it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.config.schema import Config

SECTIONS = ("environment", "one GPU", "speed", "links", "engine", "nodes")
REQUEST_FILE = "request.pickle"


@dataclass(frozen=True)
class GpuCheckRequest:
    """Options of `webrl gpu-check`."""

    config: Config  # of the machine (cluster.*) and of the job of the section "engine"
    platform: str  # "cpu" or "cuda"
    sections: tuple[str, ...] = SECTIONS
    timeout_seconds: float = 600.0  # of a section
    min_link_gb_per_second: float = 0.0  # least speed between two GPUs
    node_reports: tuple[Path, ...] = field(default_factory=tuple)  # of `webrl node check`

    def save(self, folder: Path) -> None:
        (folder / REQUEST_FILE).write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: Path) -> GpuCheckRequest:
        return pickle.loads((folder / REQUEST_FILE).read_bytes())
