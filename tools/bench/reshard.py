"""Speed of a planned weight transfer from a trainer to two engines, compared with a plain copy and a broadcast.

    python -m tools.bench.reshard [--quick] [--json FILE] [--width 2048] [--layers 2] [--vocabulary 8192] [--rounds 7]

A trainer of four ranks (tensor parallel 2 x pipeline parallel 2) and two engines of one and two ranks; each rank is a
process on this machine, over gloo. The model is a Qwen3-VL with the width of the 2B, or another, and fewer layers.
Engine ranks have plain parameters with the shapes of weights.engine_map, without vLLM. The methods alternate in rounds,
so that noise of the machine affects all equally; a method's time is from the first rank's start to the last rank's end.

- sync: weights.transport with a plan of weights.plan. Every engine rank receives its parameters once.
- raw: the same bytes between the same pairs of ranks, each pair with one contiguous buffer allocated before.
- copies: only the packing and unpacking of sync: slices that change their type or are not contiguous.
- broadcast: the trainer's shards to its rank 0, then the whole model to all engine ranks in buckets; nothing is loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_webrl.control.server import serve as serve_control
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import TransferPlan
from tools.arguments import make_bench_parser, write_json
from tools.bench.reshard_ranks import ENGINES, RANKS, SECONDS, TRAINER_RANKS, ReshardBenchConfig, serve

PRELOAD = ["tools.bench.reshard_ranks"]  # ranks are forked from a process that has imported everything
METHODS = ("sync", "raw", "copies", "broadcast")
DTYPES = (("float32", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16"), ("float32", "float32", "float32"))


class RankProcesses:
    """The processes of all ranks, for the parent."""

    def __init__(self, width: int, layers: int, vocabulary: int, types: tuple[str, str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        limit = timedelta(seconds=SECONDS)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        self.folder = tempfile.TemporaryDirectory()
        control = Path(self.folder.name, "control.json")
        service = ("127.0.0.1", 0, "bench", control, control.with_suffix(".journal"), SECONDS)
        threading.Thread(target=serve_control, args=service, daemon=True).start()
        self.task = ReshardBenchConfig(self.store.port, control, width, layers, vocabulary, types)
        start = context.Barrier(RANKS)
        self.connections, self.processes = [], []
        for rank in range(RANKS):
            mine, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, start, self.task, rank), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)
        self._results()

    def run_on_all(self, method: str) -> tuple[float, float, list[Any]]:
        """Run a method on all ranks; returns seconds from first start to last end, CPU seconds, and the results."""
        for connection in self.connections:
            connection.send(method)
        begins, ends, cpu, answers = zip(*self._results(), strict=True)
        return max(ends) - min(begins), sum(cpu), list(answers)

    def shutdown(self) -> None:
        """End all processes."""
        for connection in self.connections:
            connection.send("end")
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def _results(self) -> list[Any]:
        found = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(SECONDS):
                raise TimeoutError(f"rank {rank} did not answer within {SECONDS:g} s")
            found.append(connection.recv())
        return found


def sharded_bytes_ratio(plan: TransferPlan, description: Any) -> list[float]:
    """For the tensors that each engine shards: bytes received by its first rank / bytes of a broadcast."""
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
    """Medians of all methods for one choice of types."""
    ranks = RankProcesses(width, layers, vocabulary, types)
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in METHODS}
    try:
        for number in range(rounds + 1):
            for method in METHODS:
                seconds, cpu, _ = ranks.run_on_all(method)
                if number:  # the first round touches all memory
                    found[method].append((seconds, cpu))
        ranks.run_on_all("sync")  # `copies` has overwritten the transferred weights
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
        method: {
            "bytes": size[method],
            "seconds": statistics.median(s for s, _ in runs),
            "fastest": min(s for s, _ in runs),
            "slowest": max(s for s, _ in runs),
            "cpu": statistics.median(c for _, c in runs),
        }
        for method, runs in found.items()
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
    """Print the table of one choice of types."""
    trainer, wire, engine = result["types"]
    print(f"trainer {trainer}, wire {wire}, engines {engine}; {result['slices checked']} slices' checksums agree\n")
    print("| | MB to engines | seconds | fastest to slowest | GB/s | CPU seconds | speed / raw |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    raw = result["rows"]["raw"]
    for method, row in result["rows"].items():
        ratio = result["sync / raw"] if method == "sync" else raw["seconds"] / row["seconds"]
        speed = "" if method == "copies" else f"{ratio:.2f}"
        rate = "" if method == "copies" else f"{row['bytes'] / row['seconds'] / 1e9:.2f}"
        print(
            f"| {method} | {row['bytes'] / 1e6:.0f} | {row['seconds']:.3f} "
            f"| {row['fastest']:.3f} to {row['slowest']:.3f} | {rate} | {row['cpu']:.2f} | {speed} |"
        )
    print(f"\nspeed of sync over raw and copies one after the other: {result['sync / raw and copies']:.2f}")
    shares = ", ".join(
        f"{share:.3f} at TP {sizes.tensor}"
        for share, sizes in zip(result["sharded bytes / broadcast's"], ENGINES, strict=True)
    )
    print(f"bytes of sharded tensors that an engine rank receives, over the broadcast's: {shares}\n")


def main() -> None:
    parser = make_bench_parser(__doc__, "a small vocabulary, one choice of types, two rounds")
    parser.add_argument("--width", type=int, default=2048, help="hidden size: 2048 as in the 2B, 4096 as in the 8B")
    parser.add_argument("--layers", type=int, default=2, help="of the text model (default: 2)")
    parser.add_argument("--vocabulary", type=int, default=8192, help="entries (default: 8192)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each method (default: 7)")
    options = parser.parse_args()
    if options.quick:
        options.layers, options.vocabulary, options.rounds = 2, 2048, 2
    print(f"median of {options.rounds}; {os.cpu_count()} CPUs, {platform.machine()}, gloo on one machine\n")
    results = []
    for types in DTYPES[:1] if options.quick else DTYPES:
        results.append(measure(options.width, options.layers, options.vocabulary, types, options.rounds))
        show(results[-1])
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name not in ("json", "quick")}
        write_json(options.json, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
