"""Rank processes of the weight-transfer benchmark: each runs the methods that the parent requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_webrl.control.connection import Connection
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes, replica_ranks
from megatron_webrl.model.parameter_map import shard_ranges
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import Slice, TransferMessage, box_index
from megatron_webrl.weights.transport import TransferLink, checksum, join_link, receive, send
from tools.model_configs import make_reduced_config

SECONDS = 300.0  # limit of any wait
TRAINER = ParallelSizes(tensor=2, pipeline=2)
TRAINER_RANKS = 4
ENGINES = (EngineSizes(tensor=1), EngineSizes(tensor=2))
RANKS = TRAINER_RANKS + sum(sizes.ranks for sizes in ENGINES)
STAGING = 512 * 2**20  # bytes of a rank, the default of weights.bucket_mib
BUCKET = 64 * 2**20  # bytes, of the broadcast


@dataclass(frozen=True)
class ReshardBenchConfig:
    """Settings of all ranks. `dtype_names`: of trainer parameters, of messages, of engine parameters."""

    port: int
    control: Path  # file with the address of the control service
    width: int
    layers: int
    vocabulary: int
    dtype_names: tuple[str, str, str]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The types as torch.dtype."""
        trainer, wire, engine = (getattr(torch, name) for name in self.dtype_names)
        return trainer, wire, engine

    def hf_config(self) -> Any:
        """The proportions of the 2B with fewer layers and a smaller vocabulary."""
        text = {
            "hidden_size": self.width, "num_hidden_layers": self.layers, "num_attention_heads": self.width // 128,
            "intermediate_size": 3 * self.width, "vocab_size": self.vocabulary,
        }  # fmt: skip
        return make_reduced_config(text, {"depth": 4, "out_hidden_size": self.width, "deepstack_visual_indexes": [1]})

    def plan(self) -> TransferPlan:
        """The transfer plan for both engines."""
        trainer = TrainerTopology(TRAINER, TRAINER_RANKS, ("node",) * TRAINER_RANKS)
        engines = EngineTopology(ENGINES, tuple(("node",) * sizes.ranks for sizes in ENGINES))
        return TransferPlan(self.hf_config(), trainer, engines, self.dtypes[1].itemsize, STAGING)


def trainer_parameters(description: Any, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a trainer rank."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in parameter_mappings(description):
        groups = replica_ranks(entry, description, TRAINER, TRAINER_RANKS)
        for number, group in enumerate(groups):
            for piece in shard_ranges(entry, number, len(groups)) if rank in group else ():
                ends = list(entry.shape)
                ends[piece.dim] = piece.shard_offset + piece.length
                shapes[entry.megatron_param] = tuple(map(max, ends, shapes.get(entry.megatron_param, ends)))
    return shapes


class BenchRank:
    """State of ranks on both sides: store, process groups, and buffers for the plain copy."""

    def __init__(self, task: ReshardBenchConfig, rank: int) -> None:
        self.task, self.rank = task, rank
        self.store: Any = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=timedelta(seconds=SECONDS))
        self.control = Connection(task.control, f"rank-{rank}", SECONDS)
        self.plan = task.plan()
        self.staging = torch.ones(self.plan.max_message_bytes, dtype=torch.uint8)
        self.transfers = 0
        self.tensors: dict[str, torch.Tensor] = {}
        self.all_ranks_group: Any = self._group("whole", list(range(RANKS)))
        self.receivers = [0, *range(TRAINER_RANKS, RANKS)]
        self.receivers_group: Any = self._group("few", self.receivers) if rank in self.receivers else None

    def _group(self, name: str, ranks: list[int]) -> Any:
        store = dist.PrefixStore(name, self.store)
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timedelta(seconds=SECONDS))

    def make_buffers(self, traffic: dict[tuple[int, int], int]) -> dict[tuple[int, int], torch.Tensor]:
        """A buffer for each pair of ranks, with its memory pages in use."""
        return {pair: torch.ones(size, dtype=torch.uint8) for pair, size in traffic.items()}

    def copy_strided_slices(self, messages: Sequence[TransferMessage], sender: bool) -> None:
        """Copy each slice that needs a cast or is not contiguous."""
        wire = self.task.dtypes[1]
        for message in messages:
            for piece in message.slices:
                place = piece.source_offset if sender else piece.target_offset
                box = self.tensors[piece.source_param if sender else piece.target_param][box_index(place, piece.size)]
                if box.dtype == wire and box.is_contiguous():
                    continue
                packed = self.staging[: piece.elements * wire.itemsize].view(wire).view(piece.size)
                (packed if sender else box).copy_(box if sender else packed)

    def bucket_sizes(self) -> list[int]:
        """Sizes in bytes of the broadcasts of the whole model."""
        total = self.plan.received_bytes(0)
        return [min(BUCKET, total - start) for start in range(0, total, BUCKET)]


class TrainerRank(BenchRank):
    """A trainer rank, which sends."""

    def __init__(self, task: ReshardBenchConfig, rank: int) -> None:
        super().__init__(task, rank)
        description = task.hf_config()
        self.shapes = [trainer_parameters(description, other) for other in range(TRAINER_RANKS)]
        torch.manual_seed(rank % TRAINER.tensor)  # a stage's replicated parameters need not agree here
        self.tensors = {name: torch.randn(shape).to(task.dtypes[0]) for name, shape in self.shapes[rank].items()}
        self.outgoing = []
        for number in range(len(ENGINES)):
            senders = self.plan.senders(number)
            if rank in senders:
                link = self.join_engine(number, senders.index(rank), senders)
                self.outgoing.append((link, self.plan.messages(number, sender=rank)))
        self.raw_buffers = [
            self.make_buffers({pair: size for pair, size in self.plan.bytes_by_pair(number).items() if pair[0] == rank})
            for number in range(len(ENGINES))
        ]

    def join_engine(self, engine: int, rank: int, senders: tuple[int, ...]) -> TransferLink:
        """The link to an engine."""
        size = len(senders) + ENGINES[engine].ranks
        return join_link(self.control, f"engine-{engine}", rank, size, SECONDS, "host", senders=senders)

    def sync(self) -> None:
        """Transfer by plan."""
        self.transfers += 1
        wire = self.task.dtypes[1]
        results = send(self.outgoing, self.tensors.__getitem__, wire, STAGING, self.transfers, SECONDS)
        failed = [reason for reason in results.values() if reason is not None]
        if failed:
            raise RuntimeError(failed[0])

    def raw(self) -> None:
        """Send the same bytes to the same ranks."""
        works = []
        for number, buffers in enumerate(self.raw_buffers):
            first = TRAINER_RANKS + sum(sizes.ranks for sizes in ENGINES[:number])
            works += [
                self.all_ranks_group.send([data], first + receiver, number) for (_, receiver), data in buffers.items()
            ]
        for work in works:
            work.wait()

    def copies(self) -> None:
        """Only pack."""
        for _, messages in self.outgoing:
            self.copy_strided_slices(messages, sender=True)

    def broadcast(self) -> None:
        """Gather all shards on rank 0, which broadcasts the model."""
        wire = self.task.dtypes[1]
        if self.rank:
            for number, tensor in enumerate(self.tensors.values()):
                self.all_ranks_group.send([tensor.to(wire)], 0, number).wait()
            return
        parts = [tensor.to(wire) for tensor in self.tensors.values()]
        for other in range(1, TRAINER_RANKS):
            for number, shape in enumerate(self.shapes[other].values()):
                parts.append(torch.empty(shape, dtype=wire))
                self.all_ranks_group.recv([parts[-1]], other, number).wait()
        model = torch.cat([part.view(-1) for part in parts]).view(torch.uint8)
        start = 0
        for size in self.bucket_sizes():
            options = dist.BroadcastOptions()
            self.receivers_group.broadcast([model[start : start + size]], options).wait()
            start += size

    def sums(self) -> list[Any]:
        """Name and engine offset of every sent slice, with its checksum."""
        wire = self.task.dtypes[1]

        def box(piece: Slice) -> torch.Tensor:
            return self.tensors[piece.source_param][box_index(piece.source_offset, piece.size)].to(wire)

        return [
            [(link.name, m.receiver, s.target_param, s.target_offset), checksum(box(s))]
            for link, messages in self.outgoing
            for m in messages
            for s in m.slices
        ]


class EngineRank(BenchRank):
    """An engine rank, which receives."""

    def __init__(self, task: ReshardBenchConfig, rank: int, engine: int, receiver: int) -> None:
        super().__init__(task, rank)
        self.engine = engine
        shapes = engine_parameter_shapes(task.hf_config(), ENGINES[engine], receiver)
        self.tensors = {name: torch.zeros(shape, dtype=task.dtypes[2]) for name, shape in shapes.items()}
        senders = self.plan.senders(engine)
        rank, size = len(senders) + receiver, len(senders) + ENGINES[engine].ranks
        self.link = join_link(self.control, f"engine-{engine}", rank, size, SECONDS, "host", senders=senders)
        self.messages = self.plan.messages(engine, receiver=receiver)
        traffic = {pair: size for pair, size in self.plan.bytes_by_pair(engine).items() if pair[1] == receiver}
        self.raw_buffers = self.make_buffers(traffic)
        self.bucket = torch.ones(BUCKET, dtype=torch.uint8)

    def tensor(self, parameter: str) -> torch.Tensor:
        """See weights.transport.Target."""
        return self.tensors[parameter]

    def mark_written(self, parameter: str, elements: int) -> None:
        """See weights.transport.Target; does nothing for plain parameters."""

    def sync(self) -> None:
        """Transfer by plan."""
        self.transfers += 1
        receive(self.link, self.messages, self, self.task.dtypes[1], STAGING, self.transfers, SECONDS)

    def raw(self) -> None:
        """Receive the same bytes from the same ranks."""
        works = [
            self.all_ranks_group.recv([data], sender, self.engine) for (sender, _), data in self.raw_buffers.items()
        ]
        for work in works:
            work.wait()

    def copies(self) -> None:
        """Only unpack."""
        self.copy_strided_slices(self.messages, sender=False)

    def broadcast(self) -> None:
        """Receive the whole model, bucket by bucket."""
        for size in self.bucket_sizes():
            self.receivers_group.broadcast([self.bucket[:size]], dist.BroadcastOptions()).wait()

    def sums(self) -> list[Any]:
        """Name and offset of every received slice, with its checksum."""

        def box(piece: Slice) -> torch.Tensor:
            return self.tensors[piece.target_param][box_index(piece.target_offset, piece.size)].to(self.task.dtypes[1])

        return [
            [(self.link.name, m.receiver, s.target_param, s.target_offset), checksum(box(s))]
            for m in self.messages
            for s in m.slices
        ]


def serve(requests: Pipe, start: Any, task: ReshardBenchConfig, rank: int) -> None:
    """Body of a rank: run each requested method when all ranks are ready; send its times and result."""
    torch.set_num_threads(1)
    side: TrainerRank | EngineRank
    if rank < TRAINER_RANKS:
        side = TrainerRank(task, rank)
    else:
        engine_ranks = [(engine, receiver) for engine, sizes in enumerate(ENGINES) for receiver in range(sizes.ranks)]
        side = EngineRank(task, rank, *engine_ranks[rank - TRAINER_RANKS])
    requests.send("ready")
    while (method := requests.recv()) != "end":
        start.wait(SECONDS)
        started = time.monotonic(), time.process_time()
        result = getattr(side, method)()
        requests.send((started[0], time.monotonic(), time.process_time() - started[1], result))
