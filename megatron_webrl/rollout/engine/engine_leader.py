"""An engine that spans nodes, as its worker sees it: one part on each node, the worker's own the first.

    worker, in each life   calls the parts --------------------> starts vLLM, serves, looks after the parts
    part (part.py)         answers with the name of its host --> runs vLLM's ranks of its node until called anew

Whatever is lost of such an engine ends it as a whole: the worker ends with an error that names the part, is started
again, and calls all parts to its next life. Each life meets at a port of its own, so that nothing of an earlier one
takes part in it. The keys, of the control plane:

    engine_followers/<worker>                   the newest call: life, host and port where vLLM's ranks meet
    engine_followers/<worker>/<life>/<part>     the answer: name of the host
    engine_followers/<worker>/<life>/lost       which part has failed, and how
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.cluster.placement import rollout_process_name
from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import POLL_SECONDS, ControlClient
from megatron_webrl.rollout.engine.errors import EngineDeadError


@dataclass(frozen=True)
class NodeSpan:
    """One life of an engine over several nodes, from one of them."""

    node_rank: int  # this node's; 0: the worker's
    nnodes: int
    master_addr: str  # where vLLM's ranks meet, on the worker's node
    master_port: int
    host_ip: str  # address of this node, for the others


def start_key(worker: int) -> str:
    """Where a worker calls its parts."""
    return f"engine_followers/rollout-{worker}"


def reply_key(worker: int, life: int, part: int) -> str:
    """Where a part answers."""
    return f"{start_key(worker)}/{life}/{part}"


def failure_key(worker: int, life: int) -> str:
    """Where a part says that it has failed."""
    return f"{start_key(worker)}/{life}/failed"


def local_address(host: str, port: int) -> str:
    """The address of this machine in the network in which it reaches host:port; nothing is sent. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as found:
        found.connect(place)
        return str(found.getsockname()[0])


@dataclass
class EngineFollowers:
    """The parts of an engine in one life of its worker."""

    control: ControlClient
    worker: int
    instance_number: int
    span: NodeSpan
    nodes: tuple[int, ...]  # number of each part's node, the worker's first
    hosts: tuple[str, ...]  # its name

    @classmethod
    async def start(
        cls, config: Config, control: ControlClient, worker: int, life: int, nodes: Sequence[int]
    ) -> EngineFollowers:
        """Call the parts on `nodes`, of which the first is the worker's, and wait until all have answered.

        Raises EngineDeadError naming one that did not within run.startup_timeout_seconds; Stopped, JobFailed.
        """
        own = local_address(control.host, control.port)
        span = NodeSpan(0, len(nodes), own, _free_port(own), own)
        control.put_json(
            start_key(worker), {"instance_number": life, "host": span.master_addr, "port": span.master_port}
        )
        deadline, hosts = time.monotonic() + config.run.startup_timeout_seconds, [socket.gethostname()]
        for part in range(1, len(nodes)):
            key = reply_key(worker, life, part)
            while control.get_json(key) is None:
                control.check_job()
                if time.monotonic() > deadline:
                    raise EngineDeadError(
                        f"engine {worker} waited {config.run.startup_timeout_seconds:g} s (run.startup_timeout_seconds) for "
                        f"{rollout_process_name(worker, part)} on node {nodes[part]}, which did not answer"
                    )
                await asyncio.sleep(POLL_SECONDS)
            answer: Any = control.get_json(key)
            hosts.append(answer["host"])
        return cls(control, worker, life, span, tuple(nodes), tuple(hosts))

    def failure(self) -> str | None:
        """Which part is lost, and how. Raises JobFailed."""
        if reason := self.control.get_json(failure_key(self.worker, self.instance_number)):
            return str(reason)
        for part, (node, host) in enumerate(zip(self.nodes, self.hosts, strict=True)):
            if part and self.control.is_lost(rollout_process_name(self.worker, part)):
                silence = f"sent no heartbeat for {self.control.heartbeat_timeout_seconds:.0f} s"
                return f"{rollout_process_name(self.worker, part)} on node {node} ({host}) {silence}"
        return None

    def rank_hosts(self, ranks: int) -> list[str]:
        """Names of the hosts of an engine's ranks, which its parts share equally."""
        return [host for host in self.hosts for _ in range(ranks // len(self.hosts))]


def _free_port(host: str) -> int:
    family = socket.getaddrinfo(host, 0)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
