"""An engine over several nodes: its leader and followers.

A follower of an engine over several nodes: the process `webrl role RUN rollout-M.follower-N`.

For each instance of the engine's worker it runs vLLM's ranks of this node in a child process (follower_engine.py). If
the child ends, it reports the failure; the worker then ends and is restarted. engine_leader.py has the worker's side.
On a node without a worker it also creates the ring, which stays empty, for the trainer ranks there, if any.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import shutil
import socket
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import POLL_SECONDS, ControlClient
from megatron_webrl.placement.placement import rollout_process_name
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.engine.engine_leader import NodeSpan, failure_key, reply_key, start_key
from megatron_webrl.rollout.pool import open_node_ring
from megatron_webrl.util import child_process, stack_dump
from megatron_webrl.util.network import own_address
from megatron_webrl.util.text import configure_logging


def main(settings: str, arguments: str) -> int:
    """Run the ranks until one ends. `arguments`: worker, its instance number and the NodeSpan, as JSON."""
    faulthandler.enable()
    stack_dump.register_dump_signal()
    start = json.loads(arguments)
    name = rollout_process_name(start["worker"], start["span"]["node_rank"])
    configure_logging(f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s")
    vllm_environment.run_follower(
        parse_config(settings), start["worker"], start["instance_number"], NodeSpan(**start["span"])
    )
    return 1  # the follower kills this process; a return is a failure


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))


log = logging.getLogger(__name__)


def run(
    config: Config, control: ControlClient, worker: int, follower: int, node_count: int, node_ring: NodeRing
) -> None:
    """Serve as follower `follower`, from 1, until the job ends. Main thread only. Raises JobEnded or JobFailed."""
    control.start_heartbeat()
    number = control.register_instance()
    supervisor = _FollowerSupervisor(config, control, worker, follower, node_count)
    needs_ring = not config.evaluation.only
    ring = open_node_ring(config, control, node_ring, first_instance=number == 1) if needs_ring else nullcontext()
    try:
        with ring:
            while True:
                control.check_job()
                supervisor.poll()
                time.sleep(4 * POLL_SECONDS)
    finally:
        supervisor.close()
        control.close()


@dataclass
class _FollowerSupervisor:
    """The child process with vLLM's ranks for the newest instance of the worker."""

    config: Config
    control: ControlClient
    worker: int
    follower: int
    node_count: int
    worker_number: int = 0  # instance of the worker that the child serves
    process: child_process.ChildProcess | None = None
    scratch: Path = field(default_factory=child_process.make_scratch_folder)
    log: Path = Path(f"/proc/{os.getpid()}/fd/1")  # standard output of this process

    def __post_init__(self) -> None:
        save_config(self.config, self.scratch / "config.yaml")

    def poll(self) -> None:
        """Follow a new start of the worker, and check the child process."""
        start: Any = self.control.get_json(start_key(self.worker))
        if start is not None and start["instance_number"] != self.worker_number:
            self._kill()
            self.worker_number = start["instance_number"]
            self._follow(start)
        elif self.process is not None and self.process.poll() is not None:
            how = self.process.describe_end()
            self._kill()
            self._report_failure(how)
        elif not self.worker_number:
            self.control.report_status(f"waiting for rollout-{self.worker}")

    def close(self) -> None:
        self._kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _follow(self, start: dict[str, Any]) -> None:
        # The ranks rendezvous only once: after a reply of this follower's earlier instance the engine cannot start.
        reply = {"host": socket.gethostname(), "instance_number": self.control.instance_count(self.control.role)}
        key = reply_key(self.worker, self.worker_number, self.follower)
        if self.control.put_if_absent(key, reply) != reply:
            self._report_failure("was restarted")
            return
        address = own_address(self.control.host, self.control.port)
        self._start(NodeSpan(self.follower, self.node_count, start["host"], start["port"], address))
        self.control.report_status(f"serving instance {self.worker_number} of rollout-{self.worker}")

    def _start(self, span: NodeSpan) -> None:
        arguments = json.dumps({"worker": self.worker, "instance_number": self.worker_number, "span": asdict(span)})
        settings = str(self.scratch / "config.yaml")
        command = [sys.executable, "-m", "megatron_webrl.rollout.engine.engine_follower", settings, arguments]
        self.process = child_process.start_process(command, self.log, os.environ, f"{self.control.role}.engine")
        place = f"{span.master_addr}:{span.master_port}"
        log.info("instance %d of rollout-%d: its ranks rendezvous at %s", self.worker_number, self.worker, place)

    def _kill(self) -> None:
        if self.process is not None:  # vLLM's own shutdown would wait for the worker's ranks
            child_process.terminate_tree(self.process)
            self.process = None

    def _report_failure(self, what: str) -> None:
        reason = f"{self.control.role} on {socket.gethostname()} {what}"
        log.error("instance %d of rollout-%d: %s", self.worker_number, self.worker, reason)
        self.control.put_json(failure_key(self.worker, self.worker_number), reason)
        self.control.report_status(f"waiting for rollout-{self.worker} to restart")
