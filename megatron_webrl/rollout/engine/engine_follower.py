"""A part of an engine that spans nodes, beside the worker's own: the process that `webrl rollout --follower` is.

It lives as long as the job. For each life of the engine's worker it runs vLLM's ranks of this node in a process of its
own (part_engine.py), from the worker's call to the next one; if that ends, it tells the worker, which then ends and is
started again. parts.py has the worker's side and the keys.

On a node without a worker it also holds the ring, which stays empty, for the trainer ranks there to read.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import POLL_SECONDS, ControlClient
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.rollout.engine.engine_leader import NodeSpan, failure_key, local_address, reply_key, start_key
from megatron_webrl.rollout.ring_lifetime import open_node_ring
from megatron_webrl.system import child_process

log = logging.getLogger(__name__)


def run(config: Config, control: ControlClient, worker: int, part: int, parts: int, place: NodeRing) -> None:
    """Be part number `part`, from 1, of `parts` of a worker's engine until the job has ended.

    From the main thread. Raises Stopped, or JobFailed if the job ended otherwise.
    """
    control.start_heartbeat()
    life = control.register_instance()
    serving = _FollowerSupervisor(config, control, worker, part, parts)
    try:
        with open_node_ring(config, control, place, first_instance=life == 1):
            while True:
                control.check_job()
                serving.step()
                time.sleep(4 * POLL_SECONDS)
    finally:
        serving.close()
        control.close()


@dataclass
class _FollowerSupervisor:
    """What runs here for the newest life of the worker."""

    config: Config
    control: ControlClient
    worker: int
    part: int
    parts: int
    answered: int = 0  # life of the worker
    process: subprocess.Popen[bytes] | None = None
    scratch: Path = field(default_factory=child_process.make_scratch_folder)
    log: Path = Path(f"/proc/{os.getpid()}/fd/1")  # where this process's own words go

    def __post_init__(self) -> None:
        save_config(self.config, self.scratch / "config.yaml")

    def step(self) -> None:
        """Follow the worker's call, and see whether what runs here still does."""
        call: Any = self.control.get_json(start_key(self.worker))
        if call is not None and call["instance_number"] != self.answered:
            self._end()
            self.answered = call["instance_number"]
            self._answer(call)
        elif self.process is not None and (code := self.process.poll()) is not None:
            self._end()
            self._lost(f"{child_process.describe_exit(code)}; last log line: {child_process.last_log_line(self.log)}")
        elif not self.answered:
            self.control.report_status(f"waiting for rollout-{self.worker}")

    def close(self) -> None:
        """End what runs here, and remove its files."""
        self._end()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _answer(self, call: dict[str, Any]) -> None:
        # The ranks of one life meet once: where this part has joined already, before it was itself started again,
        # the engine cannot become whole any more.
        answer = json.dumps(
            {"host": socket.gethostname(), "instance_number": self.control.instance_count(self.control.role)}
        )
        key = reply_key(self.worker, self.answered, self.part)
        if self.control.store.compare_set(key, "", answer).decode() != answer:
            self._lost("was started again")
            return
        own = local_address(self.control.host, self.control.port)
        self._start(NodeSpan(self.part, self.parts, call["host"], call["port"], own))
        self.control.report_status(f"with life {self.answered} of rollout-{self.worker}")

    def _start(self, span: NodeSpan) -> None:
        terms = {"worker": self.worker, "instance_number": self.answered, "span": asdict(span)}
        settings = str(self.scratch / "config.yaml")
        command = [sys.executable, "-m", "megatron_webrl.rollout.engine.follower_engine", settings, json.dumps(terms)]
        self.process = child_process.start_process(command, self.log, os.environ, f"{self.control.role}.engine")
        log.info(
            "life %d of rollout-%d: its ranks meet at %s:%d",
            self.answered,
            self.worker,
            span.master_addr,
            span.master_port,
        )

    def _end(self) -> None:
        if self.process is not None:  # asked to end, vLLM would wait for ranks that wait for those of the worker
            child_process.kill_process_group(self.process.pid)
            self.process.wait()
            self.process = None

    def _lost(self, how: str) -> None:
        reason = f"{self.control.role} on {socket.gethostname()} {how}"
        log.error("life %d of rollout-%d: %s", self.answered, self.worker, reason)
        self.control.put_json(failure_key(self.worker, self.answered), reason)
        self.control.report_status(f"waiting for rollout-{self.worker} to start again")
