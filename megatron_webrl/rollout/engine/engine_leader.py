"""An engine over several nodes, as its worker sees it: the worker's own node first, a follower on each other node.

    worker, in each instance        starts the followers ----------> starts vLLM, serves, watches the followers
    follower (engine_follower.py)   replies with its host's name --> runs vLLM's ranks of its node until the next start

Any loss ends the whole engine: the worker ends with an error that names the follower, is restarted, and starts all
followers again. The ranks of each instance rendezvous at a new port, so that ranks of an earlier instance cannot join.
Keys of the control service:

    engine_followers/<worker>                          the newest start: instance number, host and port to meet at
    engine_followers/<worker>/<instance>/<follower>    the reply: name of the follower's host
    engine_followers/<worker>/<instance>/failed        the follower that failed, and the reason
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.placement.placement import rollout_process_name
from megatron_webrl.rollout.engine.errors import EngineDeadError
from megatron_webrl.util.network import own_address


@dataclass(frozen=True)
class NodeSpan:
    """One instance of an engine over several nodes, as seen from one of them."""

    node_rank: int  # of this node; 0: the worker's node
    nnodes: int
    master_addr: str  # rendezvous of vLLM's ranks, on the worker's node
    master_port: int
    host_ip: str  # address of this node, for the other nodes


def start_key(worker: int) -> str:
    return f"engine_followers/rollout-{worker}"


def reply_key(worker: int, number: int, follower: int) -> str:
    return f"{start_key(worker)}/{number}/{follower}"


def failure_key(worker: int, number: int) -> str:
    return f"{start_key(worker)}/{number}/failed"


@dataclass
class EngineFollowers:
    """The followers of an engine in one instance of its worker."""

    control: ControlClient
    worker: int
    instance_number: int
    span: NodeSpan
    nodes: tuple[int, ...]  # node numbers, the worker's first
    hosts: tuple[str, ...]  # names of their hosts

    @classmethod
    async def start(
        cls, config: Config, control: ControlClient, worker: int, number: int, nodes: Sequence[int]
    ) -> EngineFollowers:
        """Start the followers on nodes[1:] and wait for their replies.

        Raises EngineDeadError naming one that does not reply within run.startup_timeout_seconds, JobEnded, JobFailed.
        """
        address = own_address(control.host, control.port)
        span = NodeSpan(0, len(nodes), address, _free_port(address), address)
        start = {"instance_number": number, "host": span.master_addr, "port": span.master_port}
        control.put_json(start_key(worker), start)
        timeout_seconds = config.run.startup_timeout_seconds
        deadline, hosts = time.monotonic() + timeout_seconds, [socket.gethostname()]
        for follower in range(1, len(nodes)):
            key = reply_key(worker, number, follower)
            while control.get_json(key) is None:
                control.check_job()
                if time.monotonic() > deadline:
                    raise EngineDeadError(
                        f"engine {worker} waited {timeout_seconds:g} s (run.startup_timeout_seconds) for "
                        f"{rollout_process_name(worker, follower)} on node {nodes[follower]}, which did not reply"
                    )
                await asyncio.sleep(POLL_SECONDS)
            reply: Any = control.get_json(key)
            hosts.append(reply["host"])
        return cls(control, worker, number, span, tuple(nodes), tuple(hosts))

    def failure(self) -> str | None:
        """The follower that failed, and the reason; None: none. Raises JobFailed."""
        if reason := self.control.get_json(failure_key(self.worker, self.instance_number)):
            return str(reason)
        for follower, (node, host) in enumerate(zip(self.nodes, self.hosts, strict=True)):
            name = rollout_process_name(self.worker, follower)
            if follower and self.control.is_lost(name):
                seconds = self.control.heartbeat_timeout_seconds
                return f"{name} on node {node} ({host}) sent no heartbeat for {seconds:.0f} s"
        return None

    def rank_hosts(self, ranks: int) -> list[str]:
        """The host name of each of the engine's ranks, which the nodes share equally."""
        return [host for host in self.hosts for _ in range(ranks // len(self.hosts))]


def _free_port(host: str) -> int:
    family = socket.getaddrinfo(host, 0)[0][0]
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])
