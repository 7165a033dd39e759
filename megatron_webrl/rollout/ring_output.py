"""The ring of a node as its workers use it: its lifetime, and the trajectories that they write."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import NodeRing, Ring
from megatron_webrl.ring.segment import RingFull, segment_prefix, sweep_segments
from megatron_webrl.types import Trajectory

log = logging.getLogger(__name__)

RING_POLL_SECONDS = 1.0
MAX_WRITES = 32  # at once; more wait


@contextmanager
def open_node_ring(config: Config, control: ControlClient, node_ring: NodeRing, first_instance: bool) -> Iterator[Ring]:
    """Create or attach the node's ring, and unlink it if the job ends.

    The first instance removes rings of earlier jobs. If only this role ends, the trainer still reads its records.
    """
    if first_instance and (removed := sweep_segments(segment_prefix(config.run.name))):
        log.info("removed rings of an earlier job: %s", ", ".join(removed))
    with node_ring.create_or_attach(config.ring.capacity_mib * 2**20) as ring:
        clean = True
        try:
            yield ring
        except BaseException as error:
            clean = isinstance(error, JobEnded)
            raise
        finally:
            with suppress(JobFailed):  # without an answer of the service the job has ended if this role was clean
                clean = control.job_end() is not None
            if clean:
                ring.unlink()


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
