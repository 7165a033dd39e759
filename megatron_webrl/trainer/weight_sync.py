"""The trainer's side of a weight update: find the engines, link to them, transfer, collect failures.

All trainer ranks take part; the first one talks to the control service (docs/weights.md has the steps). An engine that
fails a transfer gets no more weights until it announces a new link; the other engines are served meanwhile.
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
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import Connection, JobFailed
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.process_groups import parallel_sizes_of
from megatron_webrl.model.vision_language.model import VisionLanguageModel
from megatron_webrl.track.timeline import OFF, Timeline
from megatron_webrl.trainer.parallel import all_gather_object, broadcast_object
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import box_index

log = logging.getLogger(__name__)

MAX_FAILURES = 5  # consecutive failed transfers after which the trainer gives an engine no more weights
_POLL_SECONDS = 0.01
TransferFailures = dict[str, str]  # worker -> reason


@dataclass(frozen=True)
class EngineAnnouncement:
    """An engine that requests weights."""

    link_id: str  # new after each failed transfer and each engine start
    instance_id: str  # of the worker process: <role>.<number>
    nodes: tuple[str, ...]  # host of each of its ranks
    sizes: EngineSizes


class WeightSyncer:
    """Sends the model to all engines. The methods named `has_...` are for the first rank, all others collective."""

    def __init__(
        self, chunks: Sequence[VisionLanguageModel], config: Config, control: ControlClient, platform: Platform,
        timeline: Timeline = OFF,
    ) -> None:  # fmt: skip
        self.config, self.control, self.timeline = config, control, timeline
        self.version = -1  # last sent to all engines
        self.failed_transfers = 0  # so far, counted per engine
        self.failures: TransferFailures = {}  # of the last call of `sync`
        self._chunks = chunks
        self._parameters: dict[str, Tensor] = {
            name: parameter.detach() for chunk in chunks for name, parameter in chunk.canonical_parameters().items()
        }
        by_nccl = platform.name == "cuda" and not config.weights_through_host
        self._backend: Literal["host", "nccl"] = "nccl" if by_nccl else "host"
        self._device = platform.device
        self._rank = torch.distributed.get_rank()
        self._trainer_id = control.register_instance() if self._rank == 0 else 0  # engines see a new one per attempt
        if self._rank == 0:
            control.put_json("weights/trainer", self._trainer_id)
        self._plan: TransferPlan | None = None
        self._workers: tuple[str, ...] = ()  # of the engines in the plan, in its order
        self._given_up: tuple[str, ...] = ()  # workers without which the job continues
        self._any_announced = False  # whether an engine was announced when the announcements were last read
        self._linked: dict[str, EngineAnnouncement] = {}  # engines with a link, by worker
        self._closed_links: set[str] = set()  # link ids that are never served again
        self._consecutive_failures: Counter[str] = Counter()  # by worker
        self._links: dict[str, transport.TransferLink] = {}  # this rank's links, by worker
        self._facts = Connection(control.address_file, f"{control.role}-links", config.weights.timeout_seconds)
        self._transfer_count = 0
        self.metrics: dict[str, float] = {}  # of the last transfer, by MLflow name

    def has_new_engines(self) -> bool:
        """First rank: whether an engine waits for its first weights."""
        return any(self._linked.get(worker) != engine for worker, engine in self._announced().items())

    def has_engines(self) -> bool:
        """First rank: whether the last `has_new_engines` or `sync` found an engine that has, or waits for, weights.

        Reads nothing, so that a poll that calls both reads the announcement of each worker once.
        """
        return self._any_announced

    def sync(self, version: int, new_engines_only: bool = False) -> float:
        """Send the weights as `version` to all announced engines, or to new ones only; returns seconds.

        The first call waits for all. Raises JobFailed if one starts late, all fail MAX_FAILURES times or the job ended.
        """
        with self.timeline.span("weight exchange", version=version) as span:
            updated = self._serve(version, new_engines_only)
        self._count_failures(updated, self.failures)
        self._record_metrics(version, updated, span.seconds)
        return span.seconds

    def _serve(self, version: int, new_engines_only: bool) -> list[str]:
        """Link and send; returns the workers that serve the version, and sets `failures` to those that do not."""
        self.version = self.version if new_engines_only else version
        if self._plan is None:
            self._make_plan(broadcast_object(self._await_engines() if self._rank == 0 else {}))
        announced = self._announced() if self._rank == 0 else {}
        pending = {w: a for w, a in announced.items() if not new_engines_only or self._linked.get(w) != a}
        pending, self._given_up = broadcast_object((pending, self._given_up))
        failures = _all_failures(self._join_all(pending))
        served = {worker: a.link_id for worker, a in pending.items() if worker not in failures}
        if served:
            failures |= self._transfer(version, served)
        self.failures = failures
        for worker, why in failures.items():
            self._close_link(worker)
            self.failed_transfers += 1
            if self._rank == 0:
                log.warning("%s did not get version %d; no more weights until it links again: %s", worker, version, why)
        return [worker for worker in pending if worker not in failures]

    def bytes_by_sender(self) -> dict[int, int]:
        """Bytes that each trainer rank sends in one transfer to all engines."""
        return self._transfer_plan.bytes_by_sender()

    def compare_checksums(self, worker: str, checksums: Sequence[Sequence[int | None]]) -> tuple[int, int]:
        """Numbers of equal and different slices. `checksums`: by engine rank in the plan's order; None: unknown."""
        engine, dtype = self._workers.index(worker), getattr(torch, self.config.engine_dtype)
        equal = different = 0
        for receiver, rank_checksums in enumerate(checksums):
            messages = self._transfer_plan.messages(engine, receiver=receiver)
            slices = [(message.sender, piece) for message in messages for piece in message.slices]
            for (sender, piece), checksum in zip(slices, rank_checksums, strict=True):
                if sender == self._rank and checksum is not None:
                    box = self._parameters[piece.source_param][box_index(piece.source_offset, piece.size)]
                    matches = transport.checksum(box.to(dtype)) == checksum
                    equal, different = equal + matches, different + (not matches)
        return equal, different

    # -- before a transfer ------------------------------------------------------------------------

    def _announced(self) -> dict[str, EngineAnnouncement]:
        """Engines that request weights from this trainer and send heartbeats."""
        announced = {}
        self._given_up = tuple(self.control.given_up_workers())
        for worker in self._active(self.config.worker_names):
            value = self.control.get_json(f"engine/{worker}")
            if (
                isinstance(value, dict)
                and value["trainer"] == self._trainer_id
                and value["link_id"] not in self._closed_links
                and self._consecutive_failures[worker] < MAX_FAILURES
                and not self.control.instance_has_ended(value["instance_id"])
            ):
                nodes, sizes = tuple(value["nodes"]), EngineSizes(**value["sizes"])
                announced[worker] = EngineAnnouncement(value["link_id"], value["instance_id"], nodes, sizes)
        self._any_announced = bool(announced)
        return announced

    def _await_engines(self) -> dict[str, EngineAnnouncement]:
        seconds = self.config.run.startup_timeout_seconds
        deadline = time.monotonic() + seconds
        while True:
            announced = self._announced()
            missing = [worker for worker in self._active(self.config.worker_names) if worker not in announced]
            if announced and not missing:
                return announced
            self.control.check_job()
            if time.monotonic() > deadline:
                names = ", ".join(missing)
                raise JobFailed(f"{names} started no engine within {seconds:.0f} s (run.startup_timeout_seconds)")
            time.sleep(10 * _POLL_SECONDS)  # engines that start need the processor

    def _active(self, workers: Sequence[str]) -> list[str]:
        return [worker for worker in workers if worker not in self._given_up]

    def _make_plan(self, engines: Mapping[str, EngineAnnouncement]) -> None:
        """Make the plan of all transfers: a restarted engine receives the same slices as before."""
        nodes = all_gather_object(socket.gethostname())
        trainer = TrainerTopology(parallel_sizes_of(self._chunks[0].pg_collection), len(nodes), tuple(nodes))
        self._workers = tuple(worker for worker in self.config.worker_names if worker in engines)
        announced = [engines[worker] for worker in self._workers]
        receivers = EngineTopology(tuple(a.sizes for a in announced), tuple(a.nodes for a in announced))
        dtype, staging = self.config.engine_dtype, self.config.weights.bucket_mib * 2**20
        item_bytes = getattr(torch, dtype).itemsize
        started = time.monotonic()
        self._plan = plan = TransferPlan(self._chunks[0].hf_config, trainer, receivers, item_bytes, staging)
        if self._rank == 0:
            path = "from GPU to GPU by NCCL" if self._backend == "nccl" else "through the memory of the hosts"
            log.info("weights planned in %.2f s; they travel %s", time.monotonic() - started, path)
            description = {"dtype": dtype, "backend": self._backend, "workers": self._workers}  # in the plan's order
            self.control.put_json("weights/description", plan.to_json() | description)

    def _join_all(self, pending: Mapping[str, EngineAnnouncement]) -> TransferFailures:
        failures = {}
        for worker, announcement in pending.items():
            if self._linked.get(worker) == announcement:
                continue
            self._close_link(worker)
            self._linked[worker] = announcement
            try:
                self._join(worker, announcement.link_id)
            except transport.TransferError as error:
                failures[worker] = str(error)
        return failures

    def _join(self, worker: str, link_id: str) -> None:
        plan, engine = self._transfer_plan, self._workers.index(worker)
        senders = plan.senders(engine)
        if self._rank == 0:
            self.control.put_json(f"weights/link/{link_id}", True)
        if self._rank in senders:
            self._links[worker] = transport.join_link(
                self._facts,
                f"weights/{link_id}",
                senders.index(self._rank),
                len(senders) + plan.engines.sizes[engine].ranks,
                self.config.weights.timeout_seconds,
                self._backend,
                self._device,
                senders,
            )

    def _close_link(self, worker: str) -> None:
        if (link := self._links.pop(worker, None)) is not None:
            link.close()
        if (engine := self._linked.pop(worker, None)) is not None:
            self._closed_links.add(engine.link_id)
            if self._rank == 0:
                self.control.put_json(f"weights/link/{engine.link_id}", False)

    # -- a transfer -------------------------------------------------------------------------------

    def _transfer(self, version: int, served: Mapping[str, str]) -> TransferFailures:
        self._transfer_count += 1
        if self._rank == 0:
            offer = {"version": version, "transfer": self._transfer_count, "links": dict(served)}
            self.control.put_json("weights/offer", offer)
        weights, by_link = self.config.weights, {f"weights/{link}": worker for worker, link in served.items()}
        outcome = transport.send(
            [
                (link, self._transfer_plan.messages(self._workers.index(worker), sender=self._rank))
                for worker, link in self._links.items()
                if worker in served
            ],
            self._parameters.__getitem__,
            getattr(torch, self.config.engine_dtype),
            weights.bucket_mib * 2**20,
            self._transfer_count,
            weights.timeout_seconds,
            peer_failure=lambda name: self._engine_failure(by_link[name]),
            verify=weights.verify,
        )
        failures = {by_link[name]: reason for name, reason in outcome.items() if reason is not None}
        if self._rank == 0:
            rest = {worker: link_id for worker, link_id in served.items() if worker not in failures}
            failures |= self._await_applied(version, rest)
        return _all_failures(failures)

    def _await_applied(self, version: int, served: Mapping[str, str]) -> TransferFailures:
        """First rank: wait until the engines serve the version; returns the engines that fail to."""
        failures: TransferFailures = {}
        timeout_seconds = self.config.weights.timeout_seconds
        deadline = time.monotonic() + timeout_seconds
        for worker, link_id in served.items():
            while worker not in failures:
                applied = self.control.get_json(f"weights/applied/{worker}")
                if isinstance(applied, dict) and (applied["link_id"], applied["version"]) == (link_id, version):
                    break
                self.control.check_job()
                if reason := self._engine_failure(worker):
                    failures[worker] = reason
                elif time.monotonic() > deadline:
                    failures[worker] = f"it did not serve version {version} within {timeout_seconds:g} s"
                time.sleep(_POLL_SECONDS)
        return failures

    def _engine_failure(self, worker: str) -> str | None:
        """Why an engine cannot finish its transfer; None if it still can."""
        failed, linked = self.control.get_json(f"weights/failed/{worker}"), self._linked[worker]
        if isinstance(failed, dict) and failed["link_id"] == linked.link_id:
            return str(failed["reason"])
        if self.control.instance_has_ended(linked.instance_id):
            return f"{linked.instance_id} has ended, or sends no heartbeat"
        return None

    def _count_failures(self, updated: Sequence[str], failures: TransferFailures) -> None:
        """Count consecutive failures. Raises JobFailed, on every rank, if every engine has reached MAX_FAILURES."""
        self._consecutive_failures.update(failures.keys())
        for worker in updated:
            del self._consecutive_failures[worker]
        if all(self._consecutive_failures[worker] >= MAX_FAILURES for worker in self._active(self._workers)):
            reasons = "; ".join(f"{worker}: {reason}" for worker, reason in failures.items())
            raise JobFailed(f"every engine failed {MAX_FAILURES} weight transfers in a row; {reasons}")

    def _record_metrics(self, version: int, updated: Sequence[str], seconds: float) -> None:
        if self._rank != 0 or not updated:
            return
        plan = self._transfer_plan
        gib = sum(plan.received_bytes(self._workers.index(worker)) for worker in updated) / 2**30
        applied = [cast(dict[str, Any], self.control.get_json(f"weights/applied/{worker}")) for worker in updated]
        pause = max(value["pause_seconds"] for value in applied)
        self.metrics = {
            "weights/gib": gib,
            "weights/gib_per_second": gib / seconds,
            "weights/pause_seconds": pause,
            "weights/in_place_parameters": float(sum(value["parameters"]["in_place"] for value in applied)),
            "weights/reloaded_parameters": float(sum(value["parameters"]["reload"] for value in applied)),
            "weights/engines": float(len(updated)),
            "weights/engines_with_cuda_graphs": float(sum(value["cuda_graphs"] for value in applied)),
            "weights/engines_with_async_scheduling": float(sum(value["async_scheduling"] for value in applied)),
            "weights/failed_transfers": float(self.failed_transfers),
        }
        count = len(updated)
        log.info("version %d to %d engines: %.3f GiB in %.3f s, pause %.3f s", version, count, gib, seconds, pause)

    @property
    def _transfer_plan(self) -> TransferPlan:
        assert self._plan is not None
        return self._plan


def _all_failures(failures: TransferFailures) -> TransferFailures:
    """The failures seen by any rank, on every rank; of several reasons for a worker, the lowest rank's."""
    merged: TransferFailures = {}
    for rank_failures in all_gather_object(failures):
        merged = rank_failures | merged
    return merged
