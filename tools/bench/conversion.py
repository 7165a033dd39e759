"""Speed and memory of checkpoint conversion, compared with a plain copy of the same files.

    python -m tools.bench.conversion [--quick] [--json FILE] [--folder FOLDER]

Makes random bfloat16 models, one dense and one mixture of experts, and converts each there and back, every conversion
in a process of its own. The copy is shutil.copyfile of the folder's files, also in its own process. All output is
written to disk with fsync; all input is in the page cache.

The time is that of the whole conversion, from reading config.json to renaming the folder, without the start of Python
and the import of torch and transformers: processes are forked from one that has converted a tiny model. MB/s counts
weights. Memory is the peak of the process's anonymous memory, without the mapped input, which the system can reclaim.
Workloads alternate in rounds, so that noise of the machine affects all equally.
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

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatron_webrl.model.layout import ParallelSizes
from tools.arguments import make_bench_parser, write_json
from tools.model_configs import make_reduced_config

SECONDS = 600.0  # limit of one conversion
SAMPLE_INTERVAL_SECONDS = 0.002  # between two memory readings
INPUT_SHARD_BYTES = 500_000_000  # of the model
OUTPUT_SHARD_BYTES = 5 * 10**9  # of megatron_to_hf
WORKLOADS = ("copy", "hf_to_megatron", "hf_to_megatron --tp 4", "megatron_to_hf", "megatron_to_hf of --tp 4")


@dataclass(frozen=True)
class BenchModelSize:
    """Dimensions of a benchmark model; the others are those of Qwen3-VL-2B, experts those of 30B-A3B."""

    layers: int  # of the dense model
    experts: int  # per layer; 0: dense
    vocabulary: int


FULL = (BenchModelSize(12, 0, 40_960), BenchModelSize(1, 128, 40_960))
QUICK = (BenchModelSize(2, 0, 8192), BenchModelSize(1, 24, 8192))
TINY = BenchModelSize(1, 0, 64)


def make_model(folder: Path, size: BenchModelSize) -> None:
    """Write a Qwen3-VL folder in the released format, several files of random weights."""
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
    weight_map = {key: name for name, tensors in zip(names, files, strict=True) for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def copy(source: Path, target: Path) -> None:
    """Copy a folder's files and write them to disk."""
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())


def run_workload(workload: str, source: Path, target: Path) -> None:
    """Run one of WORKLOADS."""
    if workload == "copy":
        copy(source, target)
    elif workload.startswith("megatron_to_hf"):
        megatron_to_hf(source, target, OUTPUT_SHARD_BYTES, ConversionOptions())
    else:
        tensor = 4 if workload.endswith("4") else 1
        hf_to_megatron(source, target, ParallelSizes(tensor=tensor, expert_tensor=tensor), ConversionOptions())


def run_and_measure(workload: str, source: Path, target: Path, results: Any) -> None:
    """Run a workload; send its seconds, and anonymous memory in bytes before and at the peak."""
    before = anonymous_bytes()
    peak, done = [before], threading.Event()

    def watch() -> None:
        while not done.wait(SAMPLE_INTERVAL_SECONDS):
            peak[0] = max(peak[0], anonymous_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    begun = time.perf_counter()
    run_workload(workload, source, target)
    seconds = time.perf_counter() - begun
    done.set()
    watcher.join()
    results.send({"seconds": seconds, "before": before, "peak": peak[0]})


def run_in_fork(call: Callable[..., None], *arguments: Any) -> dict[str, float] | None:
    """Run a call in a forked process; its last argument is a connection for one result. None without a result."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=call, args=(*arguments, sender), daemon=True)
    process.start()
    process.join(SECONDS)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"{call.__name__} failed or took more than {SECONDS:.0f} s")
    return receiver.recv() if receiver.poll() else None


def anonymous_bytes() -> int:
    """Bytes of this process's anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def measure(folder: Path, model_size: BenchModelSize, rounds: int) -> dict[str, Any]:
    """Medians of all workloads on one model."""
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
            os.sync()  # earlier writes must not slow down this workload
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
    """Convert a tiny model both ways to load every module."""
    model = folder / "model"
    model.mkdir()
    make_model(model, TINY)
    hf_to_megatron(model, folder / "there", ParallelSizes(), ConversionOptions())
    megatron_to_hf(folder / "there", folder / "back", OUTPUT_SHARD_BYTES, ConversionOptions())


def main() -> None:
    parser = make_bench_parser(__doc__, "a fifth of the data, one round")
    parser.add_argument("--folder", type=Path, help="where to write; determines the measured file system")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # a forked process has no threads of torch
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
    """Print a column group for each model and a row for each workload."""
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
