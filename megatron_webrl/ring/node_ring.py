"""Which ring a role of a job uses: that of its node."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import segment_prefix, sweep_segments


@dataclass(frozen=True)
class NodeRing:
    """The ring of one node, made by the node's workers and read by its trainer ranks.

    The name may be that of an earlier job of the same run; the run id is this job's alone.
    """

    node: int
    name: str  # of the segment
    job_id: str  # of the job, the same on all of its nodes

    def sweep_segments(self, run: str) -> list[str]:
        """Remove what earlier jobs of the run left on this machine and nobody uses; returns the names."""
        return sweep_segments(segment_prefix(run))

    def create_or_attach(self, size_bytes: int) -> Ring:
        """For those who write. Raises RingError, also if an earlier job's processes still use the name."""
        return Ring.create_or_attach(self.name, size_bytes, self.job_id)

    def attach(self, seconds: float) -> Ring:
        """For those who read: wait until this job's ring is there. Raises RingError."""
        return Ring.attach(self.name, seconds, self.job_id)
