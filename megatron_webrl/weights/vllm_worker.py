"""Receiving side of weight transfers in each vLLM worker process.

Importing this module registers the weight-transfer engine "webrl", and a model loader that reads no weights, with vLLM;
vLLM's workers import it as their `worker_extension_cls`. An engine selects it with
WeightTransferConfig(backend="webrl").

Phases of vLLM's protocol: init (once per link, again after a failure), then any number of [start, update, finish].
WeightReceiver.webrl_weight_update returns errors as values: when a rank raises, vLLM's multi-process executor leaves
the other ranks' results in their queues and returns them as the results of later calls, even those for tokens.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.compilation.counter import compilation_counter
from vllm.config import ModelConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from megatron_webrl.control.child_process import collect_garbage
from megatron_webrl.control.connection import Connection, ControlLost
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import TransferMessage, box_index
from megatron_webrl.weights.vllm_target import LoadPath, ModelTarget, head_shares_embedding

LOAD_FORMAT = "webrl"


@register_model_loader(LOAD_FORMAT)
class ParameterFreeLoader(DummyModelLoader):
    """Small random parameters, as vLLM's "dummy", but buffers as the model made them.

    Buffers, such as the mean and the scale of pixels, are in no update.
    """

    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill the parameters of a new model."""
        made = {name: buffer.clone() for name, buffer in model.named_buffers()}
        super().load_weights(model, model_config)
        for name, buffer in model.named_buffers():
            buffer.copy_(made[name])


BACKEND = "webrl"

log = logging.getLogger(__name__)


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """Information that an engine needs to join a link; plain JSON."""

    control: str  # file with the address of the job's control service
    name: str  # of the link
    engine: int  # index of this engine in the plan
    trainer: dict[str, Any]  # fields of TrainerTopology, and "digest" of the trainer's plan
    engines: dict[str, Any]  # fields of EngineTopology
    staging_bytes: int
    dtype: str  # of the transferred data, such as "bfloat16"
    backend: Literal["host", "nccl"]  # of the link; host: through the memory of the hosts
    timeout_seconds: float  # of every wait of a transfer
    join_timeout_seconds: float  # of joining


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Parameters of one transfer; plain JSON."""

    transfer: int  # number, above that of the link's last transfer
    version: int  # of the weights
    verify: bool = False  # compare checksums with the sender's


@dataclass(frozen=True)
class _AgreedPlan:
    """Plan that both sides of an engine's links have agreed on."""

    terms: tuple[Any, ...]  # fields of LinkInfo that determine the plan
    senders: tuple[int, ...]  # trainer ranks
    messages: tuple[TransferMessage, ...]  # received by this rank
    dtype: torch.dtype
    staging_bytes: int


class ShardTransferEngine(WeightTransferEngine[LinkInfo, UpdateInfo]):
    """Receives the slices of one vLLM worker from the trainer ranks.

    A failed update closes the link, and the model may be partially updated until a later init and complete update.
    """

    init_info_cls = LinkInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False  # the plan covers one model

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.target: ModelTarget | None = None
        self._agreed: _AgreedPlan | None = None
        self._link: transport.TransferLink | None = None
        self._seconds = 0.0

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        """Verify the trainer's plan and join a link, leaving an earlier one.

        Raises ValueError, rejecting the link, if the plans differ, TransferError after join_timeout_seconds.
        """
        self._leave()
        store = _facts(init_info)
        try:
            if init_info.backend == "nccl" and self.device.type != "cuda":
                raise ValueError(
                    f"link {init_info.name}: the trainer sends by NCCL, but engine {init_info.engine} computes on "
                    f"{self.device}; give both the same model.platform, or set weights.transport=host"
                )
            agreed = self._agree(init_info)
        except (ValueError, RuntimeError) as error:
            transport.reject_link(store, init_info.name, str(error))
            raise
        rank = len(agreed.senders) + self.parallel_config.rank
        size = len(agreed.senders) + self.parallel_config.world_size
        seconds, backend = init_info.join_timeout_seconds, init_info.backend
        self._link = transport.join_link(
            store, init_info.name, rank, size, seconds, backend, self.device, agreed.senders
        )
        self._agreed, self._seconds = agreed, init_info.timeout_seconds

    def start_weight_update(self) -> None:
        """Check that a link is joined; nothing else happens before data arrive. Raises TransferError."""
        self._joined()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive one transfer into the model. After TransferError the model may be partially updated."""
        link, agreed, target = self._joined()
        began = time.monotonic()
        target.start_update()
        try:
            transport.receive(
                link, agreed.messages, target, agreed.dtype, agreed.staging_bytes, update_info.transfer, self._seconds,
                update_info.verify,
            )  # fmt: skip
        except BaseException:
            self.abort_update()
            raise
        log.info("version %d received in %.3f s", update_info.version, time.monotonic() - began)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Override of vLLM's method, which would also synchronise an accelerator on CPU."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Finish the update on all ranks. Raises RuntimeError, closing the link, if a parameter is incomplete."""
        _, _, target = self._joined()
        try:
            target.finish_update()
        except BaseException:
            self.abort_update()
            raise

    def abort_update(self) -> None:
        """Abort a started update: restore the layers and leave the link. Idempotent."""
        if self.target is not None:
            self.target.abort_update()
        self._leave()

    def shutdown(self) -> None:
        self._leave()

    def live_checksums(self) -> list[int | None]:
        """Checksum of each slice of this rank in message order; None for slices that are not written in place."""
        if self._agreed is None or self.target is None:
            raise transport.TransferError("no plan is agreed on yet; join a link first")
        sums: list[int | None] = []
        for piece in (piece for message in self._agreed.messages for piece in message.slices):
            live = self.target.in_place_tensor(piece.target_param)
            box = None if live is None else live[box_index(piece.target_offset, piece.size)].to(self._agreed.dtype)
            sums.append(None if box is None else transport.checksum(box))
        return sums

    def _joined(self) -> tuple[transport.TransferLink, _AgreedPlan, ModelTarget]:
        if self._link is None or self._agreed is None or self.target is None:
            raise transport.TransferError("no link to the trainer is joined; join one first (init)")
        return self._link, self._agreed, self.target

    def _leave(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _agree(self, info: LinkInfo) -> _AgreedPlan:
        """Compute the plan; raise ValueError unless it equals the trainer's and matches the model."""
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
            raise ValueError(f"link {info.name}: dtype {info.dtype!r} is not a torch dtype such as bfloat16")
        hf_config, rank = self._hf_config(), self.parallel_config.rank
        fields = info.trainer
        trainer = TrainerTopology(ParallelSizes(**fields["sizes"]), fields["ranks"], tuple(fields["nodes"]))
        plan = TransferPlan(hf_config, trainer, engines, dtype.itemsize, info.staging_bytes)
        if plan.digest != fields["digest"]:
            raise ValueError(
                f"link {info.name}: engine {info.engine} and the trainer have different plans: give both the same "
                "model, settings and version of megatron_webrl"
            )
        if self.target is None:
            expected = engine_parameter_shapes(hf_config, engines.sizes[info.engine], rank)
            self.target = ModelTarget(self.model, self.vllm_config, self.device, expected)
        messages = plan.messages(info.engine, receiver=rank)
        return _AgreedPlan(terms, plan.senders(info.engine), messages, dtype, info.staging_bytes)

    def _check_sizes(self, engine: int, sizes: Sequence[EngineSizes]) -> None:
        config = self.parallel_config
        actual = EngineSizes(config.tensor_parallel_size, config.pipeline_parallel_size, config.enable_expert_parallel)
        if not 0 <= engine < len(sizes):
            raise ValueError(f"engine {engine} is not among the {len(sizes)} of the trainer's plan")
        if sizes[engine] != actual:
            raise ValueError(
                f"the trainer plans engine {engine} as {sizes[engine]}, it is {actual}; give both the same settings"
            )

    def _hf_config(self) -> Any:
        """The transformers configuration of the model as trained."""
        config = self.model_config.hf_config
        if not (self.model_config.word_embeddings_untied_by_checkpoint and head_shares_embedding(self.model)):
            return config
        # vLLM loaded a separate output head, found it equal to the embedding and tied them, but not in this config.
        config = copy.deepcopy(config)
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = True
        return config


class WeightReceiver:
    """Additional methods of a vLLM worker; `self` is the worker."""

    # Members of vLLM's worker used here.
    weight_transfer_engine: Any
    _weight_update_active: bool
    init_weight_transfer_engine: Callable[[dict[str, Any]], None]
    start_weight_update: Callable[[], None]
    update_weights: Callable[[dict[str, Any]], None]
    finish_weight_update: Callable[[], None]

    def webrl_weight_update(self, phase: str, info: dict[str, Any] | None = None) -> str | None:
        """Run a phase of vLLM's protocol: "init", "start", "update" or "finish". Returns the error, None for success.

        A start first aborts an update that a failure on another rank left open here.
        """
        try:
            if phase == "init":
                self.init_weight_transfer_engine(info or {})
            elif phase == "start":
                self._abort_open_update()
                self.start_weight_update()
            elif phase == "update":
                self.update_weights(info or {})
            elif phase == "finish":
                self.finish_weight_update()
            else:
                raise ValueError(f"phase={phase!r} is none of init, start, update, finish")
        except Exception as error:  # any error is returned to the caller as text
            known = isinstance(error, transport.TransferError | ValueError)
            log.warning("weights: %s failed: %s", phase, error, exc_info=not known)
            return f"{type(error).__name__}: {error}"
        return None

    def webrl_captured_graphs(self) -> int:
        """Number of CUDA graphs that this rank captured for its model."""
        return compilation_counter.num_cudagraph_captured

    def webrl_load_paths(self) -> dict[LoadPath, dict[str, int]]:
        """Number of parameters and their bytes in loading form, by load path."""
        target = self._webrl_target()
        paths, sizes = list(target.load_paths().values()), target.bytes_by_load_path()
        return {path: {"parameters": paths.count(path), "bytes": size} for path, size in sizes.items()}

    def webrl_live_checksums(self) -> list[int | None]:
        """See ShardTransferEngine.live_checksums; in the order of TransferPlan.messages(engine, receiver=rank)."""
        return list(self.weight_transfer_engine.live_checksums())

    def _webrl_target(self) -> ModelTarget:
        target = self.weight_transfer_engine.target
        if target is None:
            raise transport.TransferError("no plan is agreed on yet; join a link first")
        return target

    def _abort_open_update(self) -> None:
        if self._weight_update_active:
            self._weight_update_active = False
            self.weight_transfer_engine.target.abort_update()


def _facts(info: LinkInfo) -> Connection:
    connection = Connection(Path(info.control), f"engine-{info.engine}", info.join_timeout_seconds)
    try:
        connection.connect()
    except ControlLost as error:
        raise transport.TransferError(f"link {info.name}: {error}") from error
    return connection


with contextlib.suppress(ValueError):  # registered already
    WeightTransferEngineFactory.register_engine(BACKEND, ShardTransferEngine)
collect_garbage()
