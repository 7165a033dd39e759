"""The ring of one node of a job."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import segment_prefix, sweep_segments


@dataclass(frozen=True)
class NodeRing:
    """The ring of one node: workers create it and write, trainer ranks read. `job_id` tells jobs of one name apart."""

    node: int
    name: str  # of the segment
    job_id: str  # the same on all nodes of the job

    def sweep_segments(self, run: str) -> list[str]:
        """Remove unused segments of earlier jobs of the run from this machine; returns their names."""
        return sweep_segments(segment_prefix(run))

    def create_or_attach(self, size_bytes: int) -> Ring:
        """For writers. Raises RingError, also if processes of an earlier job still use the name."""
        return Ring.create_or_attach(self.name, size_bytes, self.job_id)

    def attach(self, seconds: float) -> Ring:
        """For readers: wait until this job's ring exists. Raises RingError."""
        return Ring.attach(self.name, seconds, self.job_id)
