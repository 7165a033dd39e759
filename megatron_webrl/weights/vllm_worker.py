"""The receiving end of weight transfers inside each vLLM worker process.

Importing this module registers the weight-transfer engine "webrl" with vLLM; vLLM's workers import it because it is
named in `worker_extension_cls`. An engine is made with WeightTransferConfig(backend="webrl").

Order of steps: init (once for each link, again after a failure) -> any number of [start -> update -> finish]. They
are vLLM's own, and WeightReceiver.webrl_weights does the same with errors as values. An engine of several ranks needs
that: when a rank raises, vLLM's multi-process executor leaves the other ranks' answers in their queues and takes them
for the answers to later calls, to those that compute tokens too.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import logging
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan, first_difference
from megatron_webrl.weights.slices import TransferMessage, box_index
from megatron_webrl.weights.vllm_target import LoadPath, ModelTarget, head_shares_embedding

BACKEND = "webrl"

log = logging.getLogger(__name__)


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """What an engine needs to join a link; plain JSON."""

    host: str  # of the control plane's store
    port: int
    name: str  # of the link
    engine: int  # number of this engine in the plan
    trainer: dict[str, Any]  # fields of plan.Trainer; "digest" and packed "tensors" of the trainer's plan
    engines: dict[str, Any]  # fields of plan.Engines
    staging_bytes: int
    dtype: str  # of the wire, such as "bfloat16"
    timeout_seconds: float  # limit of every wait of a transfer
    join_timeout_seconds: float  # limit of joining


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One transfer; plain JSON."""

    transfer: int  # its number, above that of the link's last
    version: int  # of the weights
    verify: bool = False  # compare checksums with the sender's


@dataclass(frozen=True)
class _Agreed:
    """What both sides of an engine's links have agreed on."""

    terms: tuple[Any, ...]  # of JoinInfo, all but where the store is, the link's name and limits
    senders: int
    messages: tuple[TransferMessage, ...]  # of this rank
    dtype: torch.dtype
    staging_bytes: int


class ShardTransferEngine(WeightTransferEngine[LinkInfo, UpdateInfo]):
    """Receives this rank's slices from the trainer ranks that hold them. Belongs to one vLLM worker.

    After a failed update the link is closed and the model may be torn; the worker goes on, and a later init and
    complete update heal it. All errors of links and transfers are transport.TransferError.
    """

    init_info_cls = LinkInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # the plan knows one model

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.target: ModelTarget | None = None
        self._agreed: _Agreed | None = None
        self._link: transport.TransferLink | None = None
        self._seconds = 0.0

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        """Agree with the trainer's plan and join a link; an earlier link is left.

        Raises ValueError if the plans differ, which the trainer learns as well, and
        TransferError if the link is not formed within join_seconds.
        """
        self._leave("another link is joined")
        store = _store(init_info)
        try:
            agreed = self._agree(init_info)
        except (ValueError, RuntimeError) as error:
            transport.reject_link(store, init_info.name, str(error))
            raise
        rank = agreed.senders + self.parallel_config.rank
        size = agreed.senders + self.parallel_config.world_size
        backend: Literal["gloo", "nccl"] = "nccl" if self.device.type == "cuda" else "gloo"
        self._link = transport.join_link(store, init_info.name, rank, size, init_info.join_timeout_seconds, backend)
        self._agreed, self._seconds = agreed, init_info.timeout_seconds

    def start_weight_update(self) -> None:
        """Nothing is touched before data moves. Raises TransferError without a link."""
        self._joined()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive one transfer into the model. After TransferError the model may be torn and the link is closed."""
        link, agreed, target = self._joined()
        began = time.monotonic()
        target.start_update()
        try:
            transport.receive(
                link,
                agreed.messages,
                target,
                agreed.dtype,
                agreed.staging_bytes,
                update_info.transfer,
                self._seconds,
                update_info.verify,
            )
        except BaseException:
            self.abort_update(f"transfer {update_info.transfer} failed")
            raise
        log.info("version %d received in %.3f s", update_info.version, time.monotonic() - began)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, which would look for an accelerator on CPU as well."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """The model is whole, here and, as every rank has received by now, on all ranks.

        Raises RuntimeError naming a parameter that is not; the link is closed then.
        """
        _, _, target = self._joined()
        try:
            target.finish_update()
        except BaseException:
            self.abort_update("the transfer was not complete")
            raise

    def abort_update(self, reason: str) -> None:
        """Give up an update that was begun: layers get back what their kernels need; the link is left. Idempotent."""
        if self.target is not None:
            self.target.abort_update()
        self._leave(reason)

    def shutdown(self) -> None:
        """Leave the link."""
        self._leave("the engine ends")

    def live_checksums(self) -> list[int | None]:
        """Checksum of each slice of this rank, in the order of its messages; None for what is not kept as it came."""
        if self._agreed is None or self.target is None:
            raise transport.TransferError("no plan is agreed on yet; join a link first")
        sums: list[int | None] = []
        for piece in (piece for message in self._agreed.messages for piece in message.slices):
            live = self.target.in_place_tensor(piece.target_param)
            box = None if live is None else live[box_index(piece.target_offset, piece.size)].to(self._agreed.dtype)
            sums.append(None if box is None else transport.checksum(box))
        return sums

    def _joined(self) -> tuple[transport.TransferLink, _Agreed, ModelTarget]:
        if self._link is None or self._agreed is None or self.target is None:
            raise transport.TransferError("no link to the trainer is joined; join one first (init)")
        return self._link, self._agreed, self.target

    def _leave(self, reason: str) -> None:
        if self._link is not None:
            self._link.close(reason)
            self._link = None

    def _agree(self, info: LinkInfo) -> _Agreed:
        """Make the plan and see that it is the trainer's and fits the model. Raises ValueError."""
        terms = (info.engine, info.trainer, info.engines, info.staging_bytes, info.dtype)
        if self._agreed is not None and self._agreed.terms == terms:
            return self._agreed
        engines = EngineTopology(
            tuple(EngineSizes(**sizes) for sizes in info.engines["sizes"]),
            tuple(tuple(nodes) for nodes in info.engines["nodes"]),
        )
        self._check_sizes(info.engine, engines.sizes)
        dtype = getattr(torch, info.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"link {info.name}: dtype {info.dtype!r} of the wire is no type of torch, such as bfloat16"
            )
        described, rank = self._description(), self.parallel_config.rank
        theirs = info.trainer
        trainer = TrainerTopology(ParallelSizes(**theirs["sizes"]), theirs["ranks"], tuple(theirs["nodes"]))
        plan = TransferPlan(described, trainer, engines, dtype.itemsize, info.staging_bytes)
        if plan.digest != theirs["digest"]:
            difference = first_difference(plan.tensor_shapes(), _unpacked(theirs["tensors"]))
            raise ValueError(
                f"link {info.name}: engine {info.engine} (here) and trainer (there) have different plans: {difference}"
            )
        if self.target is None:
            expected = engine_parameter_shapes(described, engines.sizes[info.engine], rank)
            self.target = ModelTarget(self.model, self.vllm_config, self.device, expected)
        messages = plan.messages(info.engine, receiver=rank)
        return _Agreed(terms, len(plan.senders(info.engine)), messages, dtype, info.staging_bytes)

    def _check_sizes(self, engine: int, sizes: Sequence[EngineSizes]) -> None:
        found = self.parallel_config
        mine = EngineSizes(found.tensor_parallel_size, found.pipeline_parallel_size, found.enable_expert_parallel)
        if not 0 <= engine < len(sizes):
            raise ValueError(f"engine {engine} is not among the {len(sizes)} of the trainer's plan")
        if sizes[engine] != mine:
            raise ValueError(
                f"the trainer plans engine {engine} as {sizes[engine]}, it is {mine}; give both the same settings"
            )

    def _description(self) -> Any:
        """transformers' configuration of the model as it was trained."""
        config = self.model_config.hf_config
        if not (self.model_config.word_embeddings_untied_by_checkpoint and head_shares_embedding(self.model)):
            return config
        # vLLM loaded an output head of its own, found that it is the embedding, and tied them, but not in here.
        config = copy.deepcopy(config)
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
        return config


class WeightReceiver:
    """Methods of a vLLM worker beside those of its weight-transfer protocol; `self` is the worker."""

    # vLLM's worker, as far as it is used here.
    weight_transfer_engine: Any
    _weight_update_active: bool
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def webrl_weight_update(self, phase: str, info: dict[str, Any] | None = None) -> str | None:
        """A step of vLLM's protocol, "init", "start", "update" or "finish", with its info; None, or why it failed.

        A start ends an update that a failure on another rank has left open here.
        """
        try:
            if phase == "init":
                self.init_weight_transfer_engine(info or {})
            elif phase == "start":
                self._end_left_open()
                self.start_weight_update()
            elif phase == "update":
                self.update_weights(info or {})
            elif phase == "finish":
                self.finish_weight_update()
            else:
                raise ValueError(f"step {phase!r} is none of init, start, update, finish")
        except Exception as error:  # whatever it is, it goes to the caller, in words
            known = isinstance(error, transport.TransferError | ValueError)
            log.warning("weights: %s failed: %s", phase, error, exc_info=not known)
            return f"{type(error).__name__}: {error}"
        return None

    def webrl_load_paths(self) -> dict[LoadPath, dict[str, int]]:
        """By way into the model, the number of parameters and their bytes in loading form."""
        target = self._webrl_target()
        ways, sizes = list(target.load_paths().values()), target.bytes_by_load_path()
        return {way: {"parameters": ways.count(way), "bytes": size} for way, size in sizes.items()}

    def webrl_live_checksums(self) -> list[int | None]:
        """See ShardTransferEngine.live_sums; the order is that of Plan.messages(engine, receiver=rank)."""
        return list(self.weight_transfer_engine.live_checksums())

    def _webrl_target(self) -> ModelTarget:
        target = self.weight_transfer_engine.target
        if target is None:
            raise transport.TransferError("no plan is agreed on yet; join a link first")
        return target

    def _end_left_open(self) -> None:
        if self._weight_update_active:
            self._weight_update_active = False
            self.weight_transfer_engine.target.abort_update()


def _store(info: LinkInfo) -> dist.TCPStore:
    limit = timedelta(seconds=info.join_timeout_seconds)
    try:
        return dist.TCPStore(info.host, info.port, is_master=False, timeout=limit)
    except RuntimeError as error:
        raise transport.TransferError(
            f"link {info.name}: no store answers at {info.host}:{info.port} within {info.join_timeout_seconds:g} s"
        ) from error


def _unpacked(tensors: str) -> list[Any]:
    """Names and shapes of the trainer's tensors, from Base64 of compressed JSON."""
    found = json.loads(zlib.decompress(base64.b64decode(tensors)))
    assert isinstance(found, list)
    return found


with contextlib.suppress(ValueError):  # registered already
    WeightTransferEngineFactory.register_engine(BACKEND, ShardTransferEngine)
