"""What a user asks of the check; every section's process reads it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.config.schema import Config

SECTIONS = ("environment", "nodes", "one GPU", "speed", "links", "engine")  # those that take long last
GPU_SECTIONS = ("one GPU", "speed", "links", "engine")  # compute on GPUs, if the platform is CUDA
REQUEST_FILE = "request.pickle"


@dataclass(frozen=True)
class GpuCheckRequest:
    """Options of `webrl gpu-check`."""

    config: Config  # of the machine (cluster.*) and of the job of the section "engine"
    platform: str  # "cpu" or "cuda"
    cuda_problem: str = ""  # why torch cannot use the GPUs of this machine; fails the driver, skips GPU_SECTIONS
    sections: tuple[str, ...] = SECTIONS
    timeout_seconds: float = 600.0  # of all sections
    min_link_gb_per_second: float = 0.0  # least speed between two GPUs
    node_reports: tuple[Path, ...] = field(default_factory=tuple)  # of `webrl node check`

    def save(self, folder: Path) -> None:
        (folder / REQUEST_FILE).write_bytes(pickle.dumps(self))

    @classmethod
    def load(cls, folder: Path) -> GpuCheckRequest:
        return pickle.loads((folder / REQUEST_FILE).read_bytes())
