"""An engine over several nodes: the worker's own node first, a follower on each other node.

    worker, in each instance    starts the followers ----------> starts vLLM, serves, watches the followers
    `rollout-M.follower-N`      replies with its host's name --> runs vLLM's ranks of its node until the next start

A follower runs the ranks in a child process (this module). Any loss ends the whole engine: the worker ends with an
error that names the follower, is restarted, and starts all followers again. The ranks of each instance rendezvous at a
new port, so that ranks of an earlier instance cannot join. Keys of the control service:

    engine_followers/<worker>                          the newest start: instance number, host and port to meet at
    engine_followers/<worker>/<instance>/<follower>    the reply: name of the follower's host
    engine_followers/<worker>/<instance>/failed        the follower that failed, and the reason
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control import child_process
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.placement.placement import rollout_process_name
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.engine.vllm_environment import NodeSpan
from megatron_webrl.rollout.generator import EngineDeadError
from megatron_webrl.rollout.ring_output import open_node_ring
from megatron_webrl.util.network import own_address
from megatron_webrl.util.text import configure_logging

log = logging.getLogger(__name__)


def start_key(worker: int) -> str:
    return f"engine_followers/rollout-{worker}"


def reply_key(worker: int, number: int, follower: int) -> str:
    return f"{start_key(worker)}/{number}/{follower}"


def failure_key(worker: int, number: int) -> str:
    return f"{start_key(worker)}/{number}/failed"


@dataclass
class EngineFollowers:
    """The followers of an engine in one instance of its worker, as the worker sees them."""

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
        family = socket.getaddrinfo(address, 0)[0][0]
        with socket.create_server((address, 0), family=family) as listener:
            span = NodeSpan(0, len(nodes), address, int(listener.getsockname()[1]), address)
        start = {"instance_number": number, "host": span.master_addr, "port": span.master_port}
        control.put_json(start_key(worker), start)
        timeout_seconds = config.run.startup_timeout_seconds
        deadline, hosts = time.monotonic() + timeout_seconds, [socket.gethostname()]
        for follower in range(1, len(nodes)):
            reply: Any = None
            while (reply := control.get_json(reply_key(worker, number, follower))) is None:
                control.check_job()
                if time.monotonic() > deadline:
                    raise EngineDeadError(
                        f"engine {worker} waited {timeout_seconds:g} s (run.startup_timeout_seconds) for "
                        f"{rollout_process_name(worker, follower)} on node {nodes[follower]}, which did not reply"
                    )
                await asyncio.sleep(POLL_SECONDS)
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


def run(
    config: Config, control: ControlClient, worker: int, follower: int, node_count: int, node_ring: NodeRing
) -> None:
    """Serve as follower `follower`, from 1, until the job ends. Main thread only. Raises JobEnded or JobFailed.

    On a node without a worker it also creates the ring, which stays empty, for the trainer ranks there, if any.
    """
    control.start_heartbeat()
    number = control.register_instance()
    served = _Follower(control, worker, follower, node_count)
    has_ring = not config.evaluation.only
    ring = open_node_ring(config, control, node_ring, first_instance=number == 1) if has_ring else nullcontext()
    try:
        with ring:
            while True:
                control.check_job()
                served.poll()
                time.sleep(4 * POLL_SECONDS)
    finally:
        served.kill()
        control.close()


@dataclass
class _Follower:
    """A follower, with the child process for vLLM's ranks of the newest instance of the worker."""

    control: ControlClient
    worker: int
    follower: int
    node_count: int
    worker_number: int = 0  # instance of the worker that the child serves
    process: child_process.ChildProcess | None = None

    def poll(self) -> None:
        """Follow a new start of the worker, and check the child process."""
        start: Any = self.control.get_json(start_key(self.worker))
        if start is not None and start["instance_number"] != self.worker_number:
            self.kill()
            self.worker_number = start["instance_number"]
            self._follow(start)
        elif self.process is not None and self.process.poll() is not None:
            how = self.process.describe_end()
            self.kill()
            self._report_failure(how)
        elif not self.worker_number:
            self.control.report_status(f"waiting for rollout-{self.worker}")

    def kill(self) -> None:
        if self.process is not None:  # vLLM's own shutdown would wait for the worker's ranks
            child_process.terminate_tree(self.process)
            self.process = None

    def _follow(self, start: dict[str, Any]) -> None:
        control, worker, number = self.control, self.worker, self.worker_number
        # The ranks rendezvous only once: after a reply of this follower's earlier instance the engine cannot start.
        reply = {"host": socket.gethostname(), "instance_number": control.instance_count(control.role)}
        if control.put_if_absent(reply_key(worker, number, self.follower), reply) != reply:
            self._report_failure("was restarted")
            return
        address = own_address(control.host, control.port)
        span = NodeSpan(self.follower, self.node_count, start["host"], start["port"], address)
        settings = str(control.address_file.parent / "config.yaml")
        arguments = json.dumps({"worker": worker, "number": number, "span": asdict(span)})
        command = [sys.executable, "-m", "megatron_webrl.rollout.engine.followers", settings, arguments]
        output = Path(f"/proc/{os.getpid()}/fd/1")  # standard output of this process
        self.process = child_process.start_process(command, output, os.environ, f"{control.role}.engine")
        place = f"{span.master_addr}:{span.master_port}"
        log.info("instance %d of rollout-%d: its ranks rendezvous at %s", number, worker, place)
        control.report_status(f"serving instance {number} of rollout-{worker}")

    def _report_failure(self, what: str) -> None:
        reason = f"{self.control.role} on {socket.gethostname()} {what}"
        log.error("instance %d of rollout-%d: %s", self.worker_number, self.worker, reason)
        self.control.put_json(failure_key(self.worker, self.worker_number), reason)
        self.control.report_status(f"waiting for rollout-{self.worker} to restart")


def main(settings: str, arguments: str) -> int:
    """Run vLLM's ranks until one ends. `settings`: file; `arguments`: worker, number of its instance, span, as JSON."""
    faulthandler.enable()
    child_process.register_dump_signal()
    start = json.loads(arguments)
    span = NodeSpan(**start["span"])
    name = rollout_process_name(start["worker"], span.node_rank)
    configure_logging(name)
    vllm_environment.run_follower(parse_config(settings), start["worker"], start["number"], span)
    return 1  # the follower kills this process; a return is a failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
