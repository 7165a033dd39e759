"""The ring of a node, held by the rollout processes there for as long as the job lasts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient, JobEnded, JobFailed
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.ring.ring import Ring

log = logging.getLogger(__name__)


@contextmanager
def open_node_ring(config: Config, control: ControlClient, place: NodeRing, first_instance: bool) -> Iterator[Ring]:
    """The node's ring, made if it is not there; at the job's end its name goes. `first`: in this role's first life.

    A role that ends alone leaves it: the trainer, which is attached, still finds what is in it.
    """
    if first_instance and (left := place.sweep_segments(config.run.name)):
        log.info("removed what an earlier job had left: %s", ", ".join(left))
    with place.create_or_attach(config.ring.capacity_mib * 2**20) as ring:
        ended = True
        try:
            yield ring
        except JobEnded:
            raise
        except BaseException:
            ended = _has_ended(control)
            raise
        finally:
            if ended:
                ring.unlink()


def _has_ended(control: ControlClient) -> bool:
    """Whether the whole job has ended, not this role alone. Without a control plane: unknown, so no."""
    try:
        return control.job_end() is not None
    except JobFailed:
        return False
