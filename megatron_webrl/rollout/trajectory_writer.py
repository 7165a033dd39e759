"""Write the trajectories of finished groups into the ring, and wait while it is full."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from megatron_webrl.ring.errors import RingFull
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.types import Trajectory

TIMEOUT_SECONDS = 900.0  # limit of one write into a full ring, beyond the time that the trainer may wait for a save
RING_POLL_SECONDS = 1.0
MAX_WRITES = 32  # at once; more wait


class TrajectoryWriter:
    """Writes in threads, so that the event loop stays free; a full ring blocks only the group that writes."""

    def __init__(self, ring: Ring, timeout_seconds: float) -> None:
        self.written_episodes = 0
        self._ring, self._timeout_seconds = ring, timeout_seconds
        self._writes: set[asyncio.Future[None]] = set()
        # Not the event loop's own threads, which engine, judge and control client need while the ring is full.
        self._threads = ThreadPoolExecutor(MAX_WRITES, "write to the ring")
        self._closed = False

    async def write(self, trajectories: Sequence[Trajectory]) -> None:
        """Write them in order; cancelling does not interrupt the current write. Raises RingFull."""
        for trajectory in trajectories:
            writing = asyncio.get_running_loop().run_in_executor(self._threads, self._write_one, trajectory)
            self._writes.add(writing)
            writing.add_done_callback(self._writes.discard)
            await asyncio.shield(writing)

    def close(self) -> list[asyncio.Future[None]]:
        """Stop waiting for space; returns the writes in progress."""
        self._closed = True
        return list(self._writes)

    def _write_one(self, trajectory: Trajectory) -> None:
        buffers, deadline = encode_trajectory(trajectory), time.monotonic() + self._timeout_seconds
        while not self._closed:
            try:
                self._ring.write(buffers, RING_POLL_SECONDS)
            except RingFull:
                if time.monotonic() > deadline:
                    raise
            else:
                self.written_episodes += 1
                return
