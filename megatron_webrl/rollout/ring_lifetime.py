"""Create the ring of a node, and remove it at the end of the job."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.ring.ring import Ring

log = logging.getLogger(__name__)


@contextmanager
def open_node_ring(config: Config, control: ControlClient, node_ring: NodeRing, first_instance: bool) -> Iterator[Ring]:
    """Create or attach the node's ring, and unlink it if the job ends.

    The first instance removes rings of earlier jobs. If only this role ends, the trainer still reads its records.
    """
    if first_instance and (removed := node_ring.sweep_segments(config.run.name)):
        log.info("removed rings of an earlier job: %s", ", ".join(removed))
    with node_ring.create_or_attach(config.ring.capacity_mib * 2**20) as ring:
        clean = True
        try:
            yield ring
        except BaseException as error:
            clean = isinstance(error, JobEnded)
            raise
        finally:
            if _has_ended(control, clean):
                ring.unlink()


def _has_ended(control: ControlClient, clean: bool) -> bool:
    """Whether the job has ended, not only this role. Without an answer of the service, if the role was clean."""
    try:
        return control.job_end() is not None
    except JobFailed:
        return clean
