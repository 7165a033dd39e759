"""How fast weights go from a trainer to two engines by plan, against a plain copy of the same bytes and a broadcast.

    python -m tools.bench.reshard [--quick] [--json FILE] [--width 2048] [--layers 2] [--vocabulary 8192] [--rounds 5]

A trainer of four ranks (tensor parallel 2 x pipeline 2) and two engines, of one rank and of two, each rank a process
on this machine, over gloo. The model is a Qwen3-VL with the width of the 2B, or another, and fewer layers. Engine
ranks hold plain parameters of the shapes in weights.engine_map; no vLLM. Rounds of the ways take turns, so that noise
meets all alike; a way's time is from the first rank's start to the last rank's end.

- sync: weights.transport by weights.plan. Every engine rank receives what it holds, once.
- raw: the same bytes between the same pairs of ranks, each pair's in one contiguous buffer that is there already.
- copies: what sync packs and unpacks beside the wire, alone: slices that change their type or lie in strips.
- broadcast: the trainer's parts to its rank 0, then the whole model from there to all engine ranks in buckets, which
  nobody loads anywhere.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_webrl import compat
from megatron_webrl.model.layout import Sizes, holders
from megatron_webrl.model.parameter_map import model_map, pieces
from megatron_webrl.weights.engine_map import EngineSizes, parameters
from megatron_webrl.weights.plan import Engines, Plan, Trainer
from megatron_webrl.weights.slices import Message, Slice, index
from megatron_webrl.weights.transport import Link, Outgoing, join, receive, send, slice_sums

compat.install()

from transformers import Qwen3VLConfig  # noqa: E402

SECONDS = 300.0  # limit of any wait
TRAINER = Sizes(tensor=2, pipeline=2)
TRAINER_RANKS = 4
ENGINES = (EngineSizes(tensor=1), EngineSizes(tensor=2))
RANKS = TRAINER_RANKS + sum(sizes.ranks for sizes in ENGINES)
STAGING = 512 * 2**20  # bytes of a rank, the default of weights.bucket_mib
BUCKET = 64 * 2**20  # bytes of the broadcast's buffers
PRELOAD = ["tools.bench.reshard"]  # the ranks' processes are forked from one that has imported everything
warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)  # so it is, see above
WAYS = ("sync", "raw", "copies", "broadcast")
TYPES = (("float32", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"), ("float32", "float32", "float32"))


@dataclass(frozen=True)
class Task:
    """What every rank is told. Types: of the trainer's parameters, on the wire, of the engines' parameters."""

    port: int
    width: int
    layers: int
    vocabulary: int
    types: tuple[str, str, str]

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The types as torch's."""
        trainer, wire, engine = (getattr(torch, name) for name in self.types)
        return trainer, wire, engine

    def description(self) -> Any:
        """The model: the 2B's tower and proportions, fewer layers of each, a smaller vocabulary."""
        text = {
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 128,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 3 * self.width,
            "vocab_size": self.vocabulary,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        }
        vision: dict[str, Any] = {
            "depth": 4,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": self.width,
        }
        vision |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [1]}
        return Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)

    def plan(self) -> Plan:
        """Of both engines together."""
        trainer = Trainer(TRAINER, TRAINER_RANKS, ("node",) * TRAINER_RANKS)
        engines = Engines(ENGINES, tuple(("node",) * sizes.ranks for sizes in ENGINES))
        return Plan(self.description(), trainer, engines, self.dtypes[1].itemsize, STAGING)


def trainer_parameters(description: Any, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what a trainer rank holds."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in model_map(description):
        groups = holders(entry, description, TRAINER, TRAINER_RANKS)
        for number, group in enumerate(groups):
            for piece in pieces(entry, number, len(groups)) if rank in group else ():
                ends = list(entry.shape)
                ends[piece.dim] = piece.parameter + piece.length
                shapes[entry.parameter] = tuple(map(max, ends, shapes.get(entry.parameter, ends)))
    return shapes


class Rank:
    """What ranks of both sides have: a way to start together, groups, and buffers for the plain copy."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self.store = dist.TCPStore("127.0.0.1", task.port, is_master=False, timeout=timedelta(seconds=SECONDS))
        self.plan = task.plan()
        self.staging = torch.ones(self.plan.message_bytes, dtype=torch.uint8)
        self.transfers = 0
        self.tensors: dict[str, torch.Tensor] = {}
        self.whole: Any = self._group("whole", list(range(RANKS)))
        self.receivers = [0, *range(TRAINER_RANKS, RANKS)]
        self.few: Any = self._group("few", self.receivers) if rank in self.receivers else None

    def _group(self, name: str, ranks: list[int]) -> Any:
        store = dist.PrefixStore(name, self.store)
        return dist.ProcessGroupGloo(store, ranks.index(self.rank), len(ranks), timedelta(seconds=SECONDS))

    def buffers(self, traffic: dict[tuple[int, int], int]) -> dict[tuple[int, int], torch.Tensor]:
        """A buffer for each pair of ranks, its memory touched."""
        return {pair: torch.ones(size, dtype=torch.uint8) for pair, size in traffic.items()}

    def strips(self, messages: Sequence[Message], sender: bool) -> None:
        """Copy each slice that cannot go straight between its parameter and a buffer."""
        wire = self.task.dtypes[1]
        for message in messages:
            for piece in message.slices:
                place = piece.source_place if sender else piece.target_place
                box = self.tensors[piece.source if sender else piece.target][index(place, piece.size)]
                if box.dtype == wire and box.is_contiguous():
                    continue
                packed = self.staging[: piece.elements * wire.itemsize].view(wire).view(piece.size)
                (packed if sender else box).copy_(box if sender else packed)

    def bucket_sizes(self) -> list[int]:
        """Bytes of each broadcast of the whole model."""
        total = self.plan.bytes(0)
        return [min(BUCKET, total - start) for start in range(0, total, BUCKET)]


class TrainerRank(Rank):
    """A rank that sends."""

    def __init__(self, task: Task, rank: int) -> None:
        super().__init__(task, rank)
        description = task.description()
        self.shapes = [trainer_parameters(description, other) for other in range(TRAINER_RANKS)]
        torch.manual_seed(rank % TRAINER.tensor)  # a stage's replicated parameters need not agree here
        self.tensors = {name: torch.randn(shape).to(task.dtypes[0]) for name, shape in self.shapes[rank].items()}
        self.outgoing = []
        for number, sizes in enumerate(ENGINES):
            senders = self.plan.senders(number)
            if rank in senders:
                link = self.link(number, senders.index(rank), len(senders))
                ranks = {receiver: len(senders) + receiver for receiver in range(sizes.ranks)}
                self.outgoing.append(Outgoing(link, self.plan.messages(number, sender=rank), ranks))
        self.raw_buffers = [
            self.buffers({pair: size for pair, size in self.plan.traffic(number).items() if pair[0] == rank})
            for number in range(len(ENGINES))
        ]

    def link(self, engine: int, rank: int, senders: int) -> Link:
        """The link to an engine."""
        return join(self.store, f"engine-{engine}", rank, senders + ENGINES[engine].ranks, SECONDS, "gloo")

    def sync(self) -> None:
        """By plan."""
        self.transfers += 1
        wire = self.task.dtypes[1]
        results = send(self.outgoing, self.tensors.__getitem__, wire, STAGING, self.transfers, SECONDS)
        failed = [reason for reason in results.values() if reason is not None]
        if failed:
            raise RuntimeError(failed[0])

    def raw(self) -> None:
        """The same bytes to the same ranks."""
        works = []
        for number, buffers in enumerate(self.raw_buffers):
            first = TRAINER_RANKS + sum(sizes.ranks for sizes in ENGINES[:number])
            works += [self.whole.send([data], first + receiver, number) for (_, receiver), data in buffers.items()]
        for work in works:
            work.wait()

    def copies(self) -> None:
        """The packing alone."""
        for one in self.outgoing:
            self.strips(one.messages, sender=True)

    def broadcast(self) -> None:
        """All parts to rank 0, which sends the model on."""
        wire = self.task.dtypes[1]
        if self.rank:
            for number, tensor in enumerate(self.tensors.values()):
                self.whole.send([tensor.to(wire)], 0, number).wait()
            return
        parts = [tensor.to(wire) for tensor in self.tensors.values()]
        for other in range(1, TRAINER_RANKS):
            for number, shape in enumerate(self.shapes[other].values()):
                parts.append(torch.empty(shape, dtype=wire))
                self.whole.recv([parts[-1]], other, number).wait()
        model = torch.cat([part.view(-1) for part in parts]).view(torch.uint8)
        start = 0
        for size in self.bucket_sizes():
            options = dist.BroadcastOptions()
            self.few.broadcast([model[start : start + size]], options).wait()
            start += size

    def sums(self) -> list[Any]:
        """Checksum of every slice that it sends, with the slice's name and place in the engine."""
        wire = self.task.dtypes[1]

        def box(piece: Slice) -> torch.Tensor:
            return self.tensors[piece.source][index(piece.source_place, piece.size)].to(wire)

        return [
            [(one.link.name, m.receiver, s.target, s.target_place), total]
            for one in self.outgoing
            for (m, s), total in zip(
                [(m, s) for m in one.messages for s in m.slices], slice_sums(one.messages, box), strict=True
            )
        ]


class EngineRank(Rank):
    """A rank that receives."""

    def __init__(self, task: Task, rank: int, engine: int, receiver: int) -> None:
        super().__init__(task, rank)
        self.engine = engine
        shapes = parameters(task.description(), ENGINES[engine], receiver)
        self.tensors = {name: torch.zeros(shape, dtype=task.dtypes[2]) for name, shape in shapes.items()}
        senders = len(self.plan.senders(engine))
        size = senders + ENGINES[engine].ranks
        self.link = join(self.store, f"engine-{engine}", senders + receiver, size, SECONDS, "gloo")
        self.messages = self.plan.messages(engine, receiver=receiver)
        traffic = {pair: size for pair, size in self.plan.traffic(engine).items() if pair[1] == receiver}
        self.raw_buffers = self.buffers(traffic)
        self.bucket = torch.ones(BUCKET, dtype=torch.uint8)

    def tensor(self, parameter: str) -> torch.Tensor:
        """Part of weights.transport.Target."""
        return self.tensors[parameter]

    def written(self, parameter: str, elements: int) -> None:
        """Part of weights.transport.Target; plain parameters need nothing done."""

    def sync(self) -> None:
        """By plan."""
        self.transfers += 1
        receive(self.link, self.messages, self, self.task.dtypes[1], STAGING, self.transfers, SECONDS)

    def raw(self) -> None:
        """The same bytes from the same ranks."""
        works = [self.whole.recv([data], sender, self.engine) for (sender, _), data in self.raw_buffers.items()]
        for work in works:
            work.wait()

    def copies(self) -> None:
        """The unpacking alone."""
        self.strips(self.messages, sender=False)

    def broadcast(self) -> None:
        """The whole model, bucket by bucket."""
        for size in self.bucket_sizes():
            self.few.broadcast([self.bucket[:size]], dist.BroadcastOptions()).wait()

    def sums(self) -> list[Any]:
        """Checksum of every slice that it received, with the slice's name and place."""

        def box(piece: Slice) -> torch.Tensor:
            return self.tensors[piece.target][index(piece.target_place, piece.size)].to(self.task.dtypes[1])

        pairs = [(m, s) for m in self.messages for s in m.slices]
        return [
            [(self.link.name, m.receiver, s.target, s.target_place), total]
            for (m, s), total in zip(pairs, slice_sums(self.messages, box), strict=True)
        ]


def serve(orders: Connection, start: Any, task: Task, rank: int) -> None:
    """Be a rank until the parent says otherwise: carry out each order when all are ready; answer when it ran."""
    torch.set_num_threads(1)
    side: TrainerRank | EngineRank
    if rank < TRAINER_RANKS:
        side = TrainerRank(task, rank)
    else:
        places = [(engine, receiver) for engine, sizes in enumerate(ENGINES) for receiver in range(sizes.ranks)]
        side = EngineRank(task, rank, *places[rank - TRAINER_RANKS])
    orders.send("ready")
    while (order := orders.recv()) != "end":
        start.wait(SECONDS)
        began = time.monotonic(), time.process_time()
        answer = getattr(side, order)()
        orders.send((began[0], time.monotonic(), time.process_time() - began[1], answer))


class Ranks:
    """All ranks of a task, as the parent sees them."""

    def __init__(self, width: int, layers: int, vocabulary: int, types: tuple[str, str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        limit = timedelta(seconds=SECONDS)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.task = Task(self.store.port, width, layers, vocabulary, types)
        start = context.Barrier(RANKS)
        self.connections, self.processes = [], []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, start, self.task, rank), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)
        self._answers()

    def order(self, what: str) -> tuple[float, float, list[Any]]:
        """Have all ranks do it; seconds from the first start to the last end, seconds of CPU, what they answer."""
        for connection in self.connections:
            connection.send(what)
        begins, ends, cpu, answers = zip(*self._answers(), strict=True)
        return max(ends) - min(begins), sum(cpu), list(answers)

    def end(self) -> None:
        """Let them go."""
        for connection in self.connections:
            connection.send("end")
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def _answers(self) -> list[Any]:
        found = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(SECONDS):
                raise TimeoutError(f"rank {rank} did not answer within {SECONDS:g} s")
            found.append(connection.recv())
        return found


def sharded_share(plan: Plan, description: Any) -> list[float]:
    """Of the tensors that an engine shards: bytes that its first rank receives, as a share of a broadcast's."""
    whole = parameters(description, EngineSizes(), 0)
    shares = []
    for engine, sizes in enumerate(ENGINES):
        local = parameters(description, sizes, 0)
        sharded = {name for name, shape in local.items() if sizes.tensor == 1 or shape != whole[name]}
        elements = [
            sum(s.elements for m in plan.messages(of, receiver=0) for s in m.slices if s.target in sharded)
            for of in (engine, 0)
        ]
        shares.append(elements[0] / elements[1])
    return shares


def measure(width: int, layers: int, vocabulary: int, types: tuple[str, str, str], rounds: int) -> dict[str, Any]:
    """Medians of all ways for one choice of types."""
    ranks = Ranks(width, layers, vocabulary, types)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    try:
        for number in range(rounds + 1):
            for way in WAYS:
                seconds, cpu, _ = ranks.order(way)
                if number:  # the first round touches all memory
                    found[way].append((seconds, cpu))
        ranks.order("sync")  # the copies have overwritten what the last one brought
        _, _, answers = ranks.order("sums")
    finally:
        ranks.end()
    sent = sorted(item for answer in answers[:TRAINER_RANKS] for item in answer)
    if sent != sorted(item for answer in answers[TRAINER_RANKS:] for item in answer):
        raise AssertionError("checksums of trainer and engines differ after the sync")
    plan = ranks.task.plan()
    moved, model = sum(plan.bytes(engine) for engine in range(len(ENGINES))), plan.bytes(0)
    size = {"sync": moved, "raw": moved, "copies": 0, "broadcast": model * sum(sizes.ranks for sizes in ENGINES)}
    rows = {
        way: {
            "bytes": size[way],
            "seconds": statistics.median(s for s, _ in runs),
            "fastest": min(s for s, _ in runs),
            "slowest": max(s for s, _ in runs),
            "cpu": statistics.median(c for _, c in runs),
        }
        for way, runs in found.items()
    }
    both = [raw + copies for (raw, _), (copies, _) in zip(found["raw"], found["copies"], strict=True)]
    ratios = [raw / sync for (sync, _), (raw, _) in zip(found["sync"], found["raw"], strict=True)]
    return {
        "types": types,
        "slices checked": len(sent),
        "rows": rows,
        "sync / raw": statistics.median(ratios),
        "sync / raw and copies": statistics.median(b / sync for b, (sync, _) in zip(both, found["sync"], strict=True)),
        "sharded bytes / broadcast's": sharded_share(plan, ranks.task.description()),
    }


def show(result: dict[str, Any]) -> None:
    """A table of one choice of types."""
    trainer, wire, engine = result["types"]
    print(f"trainer {trainer}, wire {wire}, engines {engine}; {result['slices checked']} slices' checksums agree\n")
    print("| | MB to engines | seconds | fastest to slowest | GB/s | CPU seconds | speed / raw |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    raw = result["rows"]["raw"]
    for way, row in result["rows"].items():
        ratio = result["sync / raw"] if way == "sync" else raw["seconds"] / row["seconds"]
        speed = "" if way == "copies" else f"{ratio:.2f}"
        rate = "" if way == "copies" else f"{row['bytes'] / row['seconds'] / 1e9:.2f}"
        print(
            f"| {way} | {row['bytes'] / 1e6:.0f} | {row['seconds']:.3f} | {row['fastest']:.3f} to {row['slowest']:.3f} "
            f"| {rate} | {row['cpu']:.2f} | {speed} |"
        )
    print(f"\nspeed of sync over raw and copies one after the other: {result['sync / raw and copies']:.2f}")
    shares = ", ".join(
        f"{share:.3f} at TP {sizes.tensor}"
        for share, sizes in zip(result["sharded bytes / broadcast's"], ENGINES, strict=True)
    )
    print(f"bytes of sharded tensors that an engine rank receives, over the broadcast's: {shares}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small vocabulary, two rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument("--width", type=int, default=2048, help="hidden size: 2048 as in the 2B, 4096 as in the 8B")
    parser.add_argument("--layers", type=int, default=2, help="of the text model (default: 2)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="entries (default: 8192)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each way (default: 7)")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.vocabulary, options.rounds = 2, 2048, 2
    print(f"median of {options.rounds}; {os.cpu_count()} CPUs, {platform.machine()}, gloo on one machine\n")
    results = []
    for types in TYPES:
        results.append(measure(options.width, options.layers, options.vocabulary, types, options.rounds))
        show(results[-1])
    if options.json:
        settings = {
            "width": options.width,
            "layers": options.layers,
            "vocabulary": options.vocabulary,
            "rounds": options.rounds,
        }
        options.json.write_text(json.dumps({"settings": settings, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
