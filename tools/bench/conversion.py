"""How fast checkpoints are converted, against a plain copy of the same files, and how much memory that takes.

    python -m tools.bench.conversion [--quick] [--json FILE] [--folder FOLDER]

Makes a model of random bfloat16 weights, dense and as a mixture of experts, and converts it there and back, each in a
process of its own. The copy is shutil.copyfile of the folder's files, in such a process, too. Everything written is
brought to the disk with fsync before a file is done with, in all cases; everything read lies in the page cache.

Timed is the whole conversion, from reading config.json to the folder's name, but not the start of Python and the import
of torch and transformers: processes are forked from one that has converted a tiny model. MB/s is of weights. Memory is
the process's anonymous memory at its highest: the mapped input is left out, since the system takes it back when it
needs to. Rounds alternate, so that noise meets all alike.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.parameter_map import parameter_mappings
from tools.arguments import make_bench_parser, write_json
from tools.bench.model_configs import make_reduced_config

SECONDS = 600.0  # limit of one conversion
SAMPLE_INTERVAL_SECONDS = 0.002  # seconds between two looks at the memory
INPUT_SHARD_BYTES = 500_000_000  # bytes of one file of the model
OUTPUT_SHARD_BYTES = 5 * 10**9  # bytes of one file that megatron_to_hf writes
WORKLOADS = ("copy", "hf_to_megatron", "hf_to_megatron --tp 4", "megatron_to_hf", "megatron_to_hf of --tp 4")


@dataclass(frozen=True)
class BenchModelSize:
    """What makes a model large. The other dimensions are those of Qwen3-VL-2B and 30B-A3B."""

    layers: int  # of the dense model
    experts: int  # of the one layer of the mixture of experts; 0: dense
    vocabulary: int


FULL = (BenchModelSize(12, 0, 40_960), BenchModelSize(1, 128, 40_960))
QUICK = (BenchModelSize(2, 0, 8192), BenchModelSize(1, 24, 8192))
TINY = BenchModelSize(1, 0, 64)


def make_model(folder: Path, size: BenchModelSize) -> None:
    """A Qwen3-VL folder in released form, in several files, with random weights."""
    text: dict[str, Any] = {"num_hidden_layers": size.layers, "vocab_size": size.vocabulary}
    if size.experts:
        text |= {"num_experts": size.experts, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        text["mlp_only_layers"] = []
    vision = {
        "depth": 2, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    config = make_reduced_config(text, vision)
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    files: list[dict[str, torch.Tensor]] = [{}]
    for entry in parameter_mappings(config):
        if entry.hf_param in files[-1]:
            continue
        if sum(tensor.nbytes for tensor in files[-1].values()) > INPUT_SHARD_BYTES:
            files.append({})
        bits = torch.randint(-(2**15), 2**15, entry.tensor_shape, dtype=torch.int16)
        files[-1][entry.hf_param] = bits.view(torch.bfloat16)
    names = [f"model-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))]
    for name, tensors in zip(names, files, strict=True):
        save_file(tensors, folder / name, metadata={"format": "pt"})
    where = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def copy(source: Path, target: Path) -> None:
    """A plain copy of a folder's files, brought to the disk."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())


def run_workload(what: str, source: Path, target: Path) -> None:
    """One of WORKS."""
    if what == "copy":
        copy(source, target)
    elif what.startswith("megatron_to_hf"):
        megatron_to_hf(source, target, OUTPUT_SHARD_BYTES, ConversionOptions())
    else:
        tensor = 4 if what.endswith("4") else 1
        hf_to_megatron(source, target, ParallelSizes(tensor=tensor, expert_tensor=tensor), ConversionOptions())


def run_and_measure(what: str, source: Path, target: Path, results: Any) -> None:
    """Do it and send seconds and the bytes of anonymous memory: before, and at the highest."""
    before = anonymous_bytes()
    peak, done = [before], threading.Event()

    def look() -> None:
        while not done.wait(SAMPLE_INTERVAL_SECONDS):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    begun = time.perf_counter()
    run_workload(what, source, target)
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    results.send({"seconds": seconds, "before": before, "peak": peak[0]})


def run_in_fork(call: Callable[..., None], *arguments: Any) -> dict[str, float] | None:
    """Run a call in a forked process; what it sent through the connection that it gets last, None for nothing."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=call, args=(*arguments, there), daemon=True)
    process.start()
    process.join(SECONDS)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"{call.__name__} failed or took more than {SECONDS:.0f} s")
    return here.recv() if here.poll() else None


def anonymous_bytes() -> int:
    """Bytes of this process's anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(folder: Path, model_size: BenchModelSize, rounds: int) -> dict[str, Any]:
    """Medians of all works on one model."""
    model = folder / "model"
    model.mkdir()
    run_in_fork(lambda _: make_model(model, model_size))
    size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    sources = dict.fromkeys(WORKLOADS[:3], model)
    sources |= {there: folder / back for there, back in zip(WORKLOADS[3:], WORKLOADS[1:3], strict=True)}
    found: dict[str, list[dict[str, float]]] = {what: [] for what in WORKLOADS}
    for _ in range(rounds):
        for what in WORKLOADS:
            shutil.rmtree(folder / what, ignore_errors=True)
            for path in sources[what].rglob("*"):  # into the page cache
                if path.is_file():
                    path.read_bytes()
            os.sync()  # what others have written is not this work's to wait for
            result = run_in_fork(run_and_measure, what, sources[what], folder / what)
            assert result is not None
            found[what].append(result)
    return {
        "bytes": size,
        "rows": {
            what: {
                "MB/s": size / statistics.median(each["seconds"] for each in runs) / 1e6,
                "peak MB": max(each["peak"] for each in runs) / 1e6,
                "above start MB": max(each["peak"] - each["before"] for each in runs) / 1e6,
            }
            for what, runs in found.items()
        },
    }


def warm_up(folder: Path) -> None:
    """Convert a tiny model both ways, so that every module is loaded."""
    model = folder / "model"
    model.mkdir()
    make_model(model, TINY)
    hf_to_megatron(model, folder / "there", ParallelSizes(), ConversionOptions())
    megatron_to_hf(folder / "there", folder / "back", OUTPUT_SHARD_BYTES, ConversionOptions())


def main() -> None:
    parser = make_bench_parser(__doc__, "a fifth of the data, one round")
    parser.add_argument("--folder", type=Path, help="where to write; its file system is what is measured")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a process that is forked has none of torch's threads
    rounds = 1 if arguments.quick else 3
    results = {}
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-conversion-") as folder:
        warm_up(Path(folder))
    for label, size in zip(("dense", "experts"), QUICK if arguments.quick else FULL, strict=True):
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-conversion-") as folder:
            results[label] = measure(Path(folder), size, rounds)
    print_table(results, rounds)
    write_json(arguments.json, {"rounds": rounds, "results": results})


def print_table(results: dict[str, dict[str, Any]], rounds: int) -> None:
    """A column group for each model, a row for each work."""
    sizes = ", ".join(f"{label} {result['bytes'] / 1e9:.2f} GB" for label, result in results.items())
    print(f"MB/s, median of {rounds}; anonymous memory in MB; {os.cpu_count()} CPUs, {platform.machine()}; {sizes}\n")
    print("| | " + " | ".join(f"{label} MB/s | of copy | peak | above start" for label in results) + " |")
    print("|---|" + "---:|---:|---:|---:|" * len(results))
    for what in WORKLOADS:
        cells = []
        for result in results.values():
            row, plain = result["rows"][what], result["rows"]["copy"]
            cells.append(
                f"{row['MB/s']:.0f} | {row['MB/s'] / plain['MB/s']:.2f} | "
                f"{row['peak MB']:.0f} | {row['above start MB']:.0f}"
            )
        print(f"| {what} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
