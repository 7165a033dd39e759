"""The trainer's side of a weight update: whom to serve, links to them, the transfer, and what came of it.

All trainer ranks take part; the first one talks to the control plane (docs/weights.md has the keys). An engine that
fails is left out until it announces another life; the others are served meanwhile.
"""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient, JobFailed
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.process_groups import parallel_sizes_of
from megatron_webrl.model.qwen3_vl.model import Qwen3VL
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import box_index

log = logging.getLogger(__name__)

MAX_FAILURES = 5
"""Transfers in a row that an engine may fail. One that fails so often is not waited for any more."""
_PAUSE = 0.01
TransferFailures = dict[str, str]  # worker -> why it did not take its weights


@dataclass(frozen=True)
class EngineAnnouncement:
    """An engine that wants weights."""

    link_id: str  # names this life of its link
    instance_id: str  # names the life of the worker that has it: <role>.<number>
    nodes: tuple[str, ...]  # of its ranks
    sizes: EngineSizes


class WeightSyncer:
    """Sends the model to all engines. Every method is collective over all trainer ranks, but `newcomers`."""

    def __init__(self, chunks: Sequence[Qwen3VL], config: Config, control: ControlClient, platform: Platform) -> None:
        self.config, self.control = config, control
        self.version = -1  # last sent to all engines
        self.failed_transfers = 0  # transfers that an engine did not take, so far
        self.failures: TransferFailures = {}  # of the last call
        self._chunks = chunks
        self._parameters: dict[str, Tensor] = {
            name: parameter.detach() for chunk in chunks for name, parameter in chunk.canonical_parameters().items()
        }
        self._backend = cast(Literal["gloo", "nccl"], platform.backend)
        self._rank = torch.distributed.get_rank()
        self._life = (
            control.register_instance() if self._rank == 0 else 0
        )  # of this trainer, among those the engines saw
        if self._rank == 0:
            control.put_json("weights/trainer", self._life)
        self._plan: TransferPlan | None = None
        self._linked: dict[str, EngineAnnouncement] = {}  # the engines with links, by worker
        self._failed: set[str] = set()  # lives that will not come back
        self._strikes: Counter[str] = Counter()  # transfers that a worker's engine failed in a row
        self._links: dict[str, transport.TransferLink] = {}  # those of this rank, by worker
        self._transfers = 0
        self._figures: dict[str, float] = {}

    def has_new_engines(self) -> bool:
        """On the first rank: whether an engine waits to be served for the first time in its life."""
        return bool(self._roll(newcomers_only=True))

    def sync(self, version: int, new_engines_only: bool = False) -> float:
        """Send the weights as `version` to all engines that are there; returns seconds.

        The first call waits for all engines. Raises JobFailed if one does not come, if all of them fail again and
        again, or if the job has ended.
        """
        started = time.monotonic()
        self.version = self.version if new_engines_only else version
        if self._plan is None:
            self._make_plan(broadcast_object(self._await_engines() if self._rank == 0 else {}))
        roll: dict[str, EngineAnnouncement] = broadcast_object(self._roll(new_engines_only) if self._rank == 0 else {})
        failures = self._agree(self._join_all(roll))
        served = {worker: a.link_id for worker, a in roll.items() if worker not in failures}
        if served:
            failures |= self._transfer(version, served)
        self.failures = failures
        for worker, reason in failures.items():
            self._leave(worker)
            self.failed_transfers += 1
            if self._rank == 0:
                log.warning(
                    "%s did not take version %d, it is left out until it comes again: %s", worker, version, reason
                )
        seconds = time.monotonic() - started
        taken = [worker for worker in roll if worker not in failures]
        self._count(taken, failures)
        self._note(version, taken, seconds)
        return seconds

    def last_transfer_metrics(self) -> dict[str, float]:
        """Figures of the last transfer by their MLflow names."""
        return self._figures

    def bytes_by_sender(self) -> dict[int, int]:
        """Bytes that each trainer rank sends in one transfer to all engines."""
        return self._planned().bytes_by_sender()

    def compare_checksums(self, worker: str, checksums: Sequence[Sequence[int | None]]) -> tuple[int, int]:
        """Hold what an engine has in memory against this rank's parameters: how many slices agree, how many differ.

        `sums`: of each engine rank, those of `Engine.weight_sums`.
        """
        engine, dtype = self.config.worker_names.index(worker), getattr(torch, self.config.engine_dtype)
        same = different = 0
        for receiver, theirs in enumerate(checksums):
            messages = self._planned().messages(engine, receiver=receiver)
            pieces = [(message.sender, piece) for message in messages for piece in message.slices]
            for (sender, piece), found in zip(pieces, theirs, strict=True):
                if sender == self._rank and found is not None:
                    box = self._parameters[piece.source_param][box_index(piece.source_offset, piece.size)]
                    agrees = transport.checksum(box.to(dtype)) == found
                    same, different = same + agrees, different + (not agrees)
        return same, different

    # -- before a transfer ------------------------------------------------------------------------

    def _announced(self) -> dict[str, EngineAnnouncement]:
        """Engines that want weights from this trainer and send heartbeats."""
        found = {}
        for worker in self.config.worker_names:
            value = self.control.get_json(f"engine/{worker}")
            if not isinstance(value, dict) or value["trainer"] != self._life or value["link_id"] in self._failed:
                continue
            if self._strikes[worker] < MAX_FAILURES and not self.control.instance_has_ended(value["instance_id"]):
                sizes = EngineSizes(**value["sizes"])
                found[worker] = EngineAnnouncement(value["link_id"], value["instance_id"], tuple(value["nodes"]), sizes)
        return found

    def _await_engines(self) -> dict[str, EngineAnnouncement]:
        deadline = time.monotonic() + self.config.run.startup_timeout_seconds
        while len(found := self._announced()) < len(self.config.worker_names):
            self.control.check_job()
            if time.monotonic() > deadline:
                missing = ", ".join(worker for worker in self.config.worker_names if worker not in found)
                raise JobFailed(
                    f"{missing} started no engine within {self.config.run.startup_timeout_seconds:.0f} s (run.startup_timeout_seconds)"
                )
            time.sleep(_PAUSE)
        return found

    def _roll(self, newcomers_only: bool) -> dict[str, EngineAnnouncement]:
        return {w: a for w, a in self._announced().items() if not newcomers_only or self._linked.get(w) != a}

    def _make_plan(self, engines: Mapping[str, EngineAnnouncement]) -> None:
        """Plan for good: an engine that starts again sends and receives what its earlier life did."""
        nodes: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(nodes, socket.gethostname())
        trainer = TrainerTopology(parallel_sizes_of(self._chunks[0].pg_collection), len(nodes), tuple(nodes))
        announced = [engines[worker] for worker in self.config.worker_names]
        receivers = EngineTopology(tuple(a.sizes for a in announced), tuple(a.nodes for a in announced))
        dtype, staging = self.config.engine_dtype, self.config.weights.bucket_mib * 2**20
        item_bytes = getattr(torch, dtype).itemsize
        started = time.monotonic()
        self._plan = plan = TransferPlan(self._chunks[0].hf_config, trainer, receivers, item_bytes, staging)
        if self._rank == 0:
            log.info("weights planned in %.2f s", time.monotonic() - started)
            self.control.put_json("weights/description", plan.to_json() | {"dtype": dtype})

    def _join_all(self, roll: Mapping[str, EngineAnnouncement]) -> TransferFailures:
        failures = {}
        for worker, announcement in roll.items():
            if self._linked.get(worker) == announcement:
                continue
            self._leave(worker)
            self._linked[worker] = announcement
            try:
                self._join(worker, announcement.link_id)
            except transport.TransferError as error:
                failures[worker] = str(error)
        return failures

    def _join(self, worker: str, life: str) -> None:
        plan, engine = self._planned(), self.config.worker_names.index(worker)
        senders = plan.senders(engine)
        if self._rank == 0:
            self.control.put_json(f"weights/link/{life}", True)
        if self._rank in senders:
            self._links[worker] = transport.join_link(
                self.control.store,
                f"weights/{life}",
                senders.index(self._rank),
                len(senders) + plan.engines.sizes[engine].ranks,
                self.config.weights.timeout_seconds,
                self._backend,
            )

    def _leave(self, worker: str) -> None:
        if (link := self._links.pop(worker, None)) is not None:
            link.close()
        if (left := self._linked.pop(worker, None)) is not None:
            self._failed.add(left.link_id)
            if self._rank == 0:
                self.control.put_json(f"weights/link/{left.link_id}", False)

    # -- a transfer -------------------------------------------------------------------------------

    def _transfer(self, version: int, served: Mapping[str, str]) -> TransferFailures:
        self._transfers += 1
        if self._rank == 0:
            offer = {"version": version, "transfer": self._transfers, "links": dict(served)}
            self.control.put_json("weights/offer", offer)
        weights, by_link = self.config.weights, {f"weights/{life}": worker for worker, life in served.items()}
        outcome = transport.send(
            [self._outgoing(worker) for worker in served if worker in self._links],
            self._parameters.__getitem__,
            getattr(torch, self.config.engine_dtype),
            weights.bucket_mib * 2**20,
            self._transfers,
            weights.timeout_seconds,
            peer_failure=lambda name: self._trouble_of(by_link[name]),
            verify=weights.verify,
        )
        failures = {by_link[name]: reason for name, reason in outcome.items() if reason is not None}
        if self._rank == 0:
            rest = {worker: life for worker, life in served.items() if worker not in failures}
            failures |= self._await_taken(version, rest)
        return self._agree(failures)

    def _outgoing(self, worker: str) -> transport.OutgoingMessages:
        engine, plan = self.config.worker_names.index(worker), self._planned()
        first = len(plan.senders(engine))
        ranks = {receiver: first + receiver for receiver in range(plan.engines.sizes[engine].ranks)}
        return transport.OutgoingMessages(self._links[worker], plan.messages(engine, sender=self._rank), ranks)

    def _await_taken(self, version: int, served: Mapping[str, str]) -> TransferFailures:
        """Wait until the engines serve the version; returns those that do not."""
        failures: TransferFailures = {}
        deadline = time.monotonic() + self.config.weights.timeout_seconds
        for worker, life in served.items():
            while not _says(self.control.get_json(f"weights/applied/{worker}"), life, version):
                self.control.check_job()
                if reason := self._trouble_of(worker):
                    failures[worker] = reason
                    break
                if time.monotonic() > deadline:
                    failures[worker] = (
                        f"it did not serve version {version} within {self.config.weights.timeout_seconds:g} s"
                    )
                    break
                time.sleep(_PAUSE)
        return failures

    def _trouble_of(self, worker: str) -> str | None:
        """What is known to be wrong with an engine."""
        failed, linked = self.control.get_json(f"weights/failed/{worker}"), self._linked[worker]
        if isinstance(failed, dict) and failed["link_id"] == linked.link_id:
            return str(failed["reason"])
        return (
            f"{linked.instance_id} is over, or sends no heartbeat"
            if self.control.instance_has_ended(linked.instance_id)
            else None
        )

    def _agree(self, failures: TransferFailures) -> TransferFailures:
        """The failures that any rank has seen, on every rank."""
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, failures)
        merged: TransferFailures = {}
        for found in everyone:
            merged = found | merged
        return merged

    def _count(self, taken: Sequence[str], failures: TransferFailures) -> None:
        """Count failures in a row. Raises JobFailed, on every rank, if no engine is left that might take weights."""
        self._strikes.update(failures.keys())
        for worker in taken:
            del self._strikes[worker]
        if all(self._strikes[worker] >= MAX_FAILURES for worker in self.config.worker_names):
            reasons = "; ".join(f"{worker}: {reason}" for worker, reason in failures.items())
            raise JobFailed(f"no engine took its weights in {MAX_FAILURES} transfers in a row; {reasons}")

    def _note(self, version: int, served: Sequence[str], seconds: float) -> None:
        if self._rank != 0 or not served:
            return
        plan = self._planned()
        size = sum(plan.received_bytes(self.config.worker_names.index(worker)) for worker in served) / 2**30
        taken = [cast(dict[str, Any], self.control.get_json(f"weights/applied/{worker}")) for worker in served]
        pause = max(value["pause_seconds"] for value in taken)
        self._figures = {
            "weights/gib": size,
            "weights/gib_per_second": size / seconds,
            "weights/pause_seconds": pause,
            "weights/engines": float(len(served)),
            "weights/failed_transfers": float(self.failed_transfers),
        }
        log.info(
            "version %d to %d engines: %.3f GiB in %.3f s, longest pause %.3f s",
            version,
            len(served),
            size,
            seconds,
            pause,
        )

    def _planned(self) -> TransferPlan:
        assert self._plan is not None
        return self._plan


def _says(value: object, life: str, version: int) -> bool:
    return isinstance(value, dict) and value["link_id"] == life and value["version"] == version
