"""The ring of a node, held by the rollout processes there for as long as the job lasts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_webrl.config import Config
from megatron_webrl.control import Control, JobFailed, Stopped
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.ring.ring import Ring

log = logging.getLogger(__name__)


@contextmanager
def held_ring(config: Config, control: Control, place: NodeRing, first: bool) -> Iterator[Ring]:
    """The node's ring, made if it is not there; at the job's end its name goes. `first`: in this role's first life.

    A role that ends alone leaves it: the trainer, which is attached, still finds what is in it.
    """
    if first and (left := place.sweep(config.run.name)):
        log.info("removed what an earlier job had left: %s", ", ".join(left))
    with place.create_or_attach(config.ring.mib * 2**20) as ring:
        ended = True
        try:
            yield ring
        except Stopped:
            raise
        except BaseException:
            ended = _has_ended(control)
            raise
        finally:
            if ended:
                ring.unlink()


def _has_ended(control: Control) -> bool:
    """Whether the whole job has ended, not this role alone. Without a control plane: unknown, so no."""
    try:
        return control.end() is not None
    except JobFailed:
        return False
