"""How fast weights go from a trainer to two engines by plan, against a plain copy of the same bytes and a broadcast.

    python -m tools.bench.reshard [--quick] [--json FILE] [--width 2048] [--layers 2] [--vocabulary 8192] [--rounds 7]

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

import multiprocessing
import os
import platform
import statistics
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import TransferPlan
from tools.arguments import make_bench_parser, write_json
from tools.bench.reshard_ranks import ENGINES, RANKS, SECONDS, TRAINER_RANKS, ReshardBenchConfig, serve

PRELOAD = ["tools.bench.reshard_ranks"]  # the ranks' processes are forked from one that has imported everything
METHODS = ("sync", "raw", "copies", "broadcast")
DTYPES = (("float32", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"), ("float32", "float32", "float32"))


class RankProcesses:
    """All ranks of a task, as the parent sees them."""

    def __init__(self, width: int, layers: int, vocabulary: int, types: tuple[str, str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        limit = timedelta(seconds=SECONDS)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.task = ReshardBenchConfig(self.store.port, width, layers, vocabulary, types)
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

    def run_on_all(self, what: str) -> tuple[float, float, list[Any]]:
        """Have all ranks do it; seconds from the first start to the last end, seconds of CPU, what they answer."""
        for connection in self.connections:
            connection.send(what)
        begins, ends, cpu, answers = zip(*self._answers(), strict=True)
        return max(ends) - min(begins), sum(cpu), list(answers)

    def shutdown(self) -> None:
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


def sharded_bytes_ratio(plan: TransferPlan, description: Any) -> list[float]:
    """Of the tensors that an engine shards: bytes that its first rank receives, as a share of a broadcast's."""
    whole = engine_parameter_shapes(description, EngineSizes(), 0)
    shares = []
    for engine, sizes in enumerate(ENGINES):
        local = engine_parameter_shapes(description, sizes, 0)
        sharded = {name for name, shape in local.items() if sizes.tensor == 1 or shape != whole[name]}
        elements = [
            sum(s.elements for m in plan.messages(of, receiver=0) for s in m.slices if s.target_param in sharded)
            for of in (engine, 0)
        ]
        shares.append(elements[0] / elements[1])
    return shares


def measure(width: int, layers: int, vocabulary: int, types: tuple[str, str, str], rounds: int) -> dict[str, Any]:
    """Medians of all ways for one choice of types."""
    ranks = RankProcesses(width, layers, vocabulary, types)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in METHODS}
    try:
        for number in range(rounds + 1):
            for way in METHODS:
                seconds, cpu, _ = ranks.run_on_all(way)
                if number:  # the first round touches all memory
                    found[way].append((seconds, cpu))
        ranks.run_on_all("sync")  # the copies have overwritten what the last one brought
        _, _, answers = ranks.run_on_all("sums")
    finally:
        ranks.shutdown()
    sent = sorted(item for answer in answers[:TRAINER_RANKS] for item in answer)
    if sent != sorted(item for answer in answers[TRAINER_RANKS:] for item in answer):
        raise AssertionError("checksums of trainer and engines differ after the sync")
    plan = ranks.task.plan()
    moved, model = sum(plan.received_bytes(engine) for engine in range(len(ENGINES))), plan.received_bytes(0)
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
        "sharded bytes / broadcast's": sharded_bytes_ratio(plan, ranks.task.hf_config()),
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
    parser = make_bench_parser(__doc__, "a small vocabulary, two rounds")
    parser.add_argument("--width", type=int, default=2048, help="hidden size: 2048 as in the 2B, 4096 as in the 8B")
    parser.add_argument("--layers", type=int, default=2, help="of the text model (default: 2)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="entries (default: 8192)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each way (default: 7)")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.vocabulary, options.rounds = 2, 2048, 2
    print(f"median of {options.rounds}; {os.cpu_count()} CPUs, {platform.machine()}, gloo on one machine\n")
    results = []
    for types in DTYPES:
        results.append(measure(options.width, options.layers, options.vocabulary, types, options.rounds))
        show(results[-1])
    if options.json:
        settings = {
            "width": options.width,
            "layers": options.layers,
            "vocabulary": options.vocabulary,
            "rounds": options.rounds,
        }
        write_json(options.json, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
