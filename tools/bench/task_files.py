"""Task files of 300,000 rows: start of one process and of a node's workers, memory, and draws.

Rows are generated in WebGym's format, on a third as many websites as there are rows. Each contestant runs in processes
of its own. Seconds are from the call to the first task, without imports. Memory is what a process has gained once it
has read READS tasks: private memory (USS), and memory with its share of what processes have in common (PSS); of
several processes at once it is the sum. With tasks tried, each process has also what a sampler has learned of that
many tasks. The peers hold all rows: a list of json.loads of every line, and Dataset.from_json of `datasets`, which
keeps an Arrow copy of the file for later starts.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import psutil

from megatron_webrl.config.tasks import SamplerConfig, tasks_config
from megatron_webrl.tasks.files.rows import FORMATS
from megatron_webrl.tasks.files.source import FileTaskSource
from megatron_webrl.tasks.files.table import TRAIN_FILE, load_tasks
from megatron_webrl.tasks.sampler.knowledge import PassRate, SamplerKnowledge, task_unit
from megatron_webrl.tasks.sampler.row_sampler import RowSampler
from megatron_webrl.types import Task
from tools.arguments import make_bench_parser, write_json

ROWS, QUICK_ROWS = 300_000, 3_000
PROCESSES = 8  # workers of a node
TRIED = (10_000, 100_000)  # tasks that a sampler has tried; fewer if the file has fewer rows
DRAWS = 3_000
READS = 100  # tasks that a process reads before its memory is measured
SAMPLERS = ("uniform", "ratio", "curriculum", "near_target")
START_SECONDS, MEMORY_MIB, DRAWS_PER_SECOND = 20.0, 800.0, 1_000.0  # goals
_MIB = 2**20
_WORDS = [f"word{number}" for number in range(500)]
_DOMAINS = ("Shopping", "Travel", "Arts & Entertainment", "Science", "Jobs", "Health", "Government", "Sports")


@dataclass(frozen=True)
class Opened:
    """One contestant in a number of processes at once."""

    seconds: float  # of the slowest process
    cpu_seconds: float  # of the process that used most
    private_mib: float  # sum over the processes
    shared_mib: float  # sum over the processes, each with its share of what several have


def write_file(path: Path, rows: int, seed: int = 0) -> None:
    """Write a file of `rows` rows in WebGym's format."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(rows):
            facts = rng.choice((1, 1, 2, 3, 4, 5, 7, 9))
            row = {
                "benchmark_name": rng.choice(("InSTA", "PAE", "TravelPlanner")),
                "task_name": " ".join(rng.choices(_WORDS, k=25)),
                "domain": rng.choice(_DOMAINS),
                "subdomain": rng.choice(_WORDS),
                "website": f"www.site{rng.randrange(rows // 3)}.com",
                "definite_answer": rng.choice((None, "42")),
                "task_id": number,
                "difficulty": facts,
                "evaluator_reference": [{"id": 1, "description": "group", "facts": _sentences(rng, facts)}],
            }
            file.write(json.dumps(row) + "\n")


def _sentences(rng: random.Random, count: int) -> list[str]:
    return [" ".join(rng.choices(_WORDS, k=8)) for _ in range(count)]


@dataclass(frozen=True)
class Contestant:
    """A way to hold the rows of a file."""

    open: Callable[[str], Any]
    read: Callable[[Any, int], object]  # the task of a ticket
    module: str | None = None  # imported before the clock starts


def _open_table(path: str) -> FileTaskSource:
    sampler = SamplerConfig("near_target", per="website")  # the one that holds most arrays of its own
    return FileTaskSource(tasks_config(source="webgym", train_file=path, sampler=sampler))


def _draw_task(source: FileTaskSource, ticket: int) -> Task:
    return source.training_task(0, ticket)


def _open_tried(tried: int, path: str) -> tuple[FileTaskSource, SamplerKnowledge]:
    sampler = SamplerConfig("near_target", per="task")
    source = FileTaskSource(tasks_config(source="webgym", train_file=path, sampler=sampler))
    keys = load_tasks(path, TRAIN_FILE, FORMATS["webgym"]).task_keys[:tried]
    units = [task_unit(int(key)) for key in keys]
    return source, SamplerKnowledge(passes={unit: PassRate(index % 9 / 8, 2) for index, unit in enumerate(units)})


def _draw_tried(opened: tuple[FileTaskSource, SamplerKnowledge], ticket: int) -> Task:
    source, knowledge = opened
    return source.training_task(0, ticket, knowledge)


def _load_json(path: str) -> list[Any]:
    with open(path, "rb") as file:
        return [json.loads(line) for line in file]


def _load_dataset(path: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_json(path, cache_dir=f"{path}.arrow")


def _read_row(rows: Any, ticket: int) -> Any:
    return rows[ticket * 7919 % len(rows)]


CONTESTANTS = {
    "table": Contestant(_open_table, _draw_task),
    **{f"tried_{tried}": Contestant(partial(_open_tried, tried), _draw_tried) for tried in TRIED},
    "json.loads": Contestant(_load_json, _read_row),
    "datasets": Contestant(_load_dataset, _read_row, module="datasets"),
}


def _measure(name: str, path: str, barrier: Barrier, found: Any) -> None:
    """In a process: open, and report seconds and the memory that it took while all processes hold theirs."""
    contestant, process = CONTESTANTS[name], psutil.Process()
    if contestant.module is not None:
        importlib.import_module(contestant.module)
    barrier.wait()
    before = process.memory_full_info()
    barrier.wait()
    started, used = time.perf_counter(), time.process_time()
    opened = contestant.open(path)
    contestant.read(opened, 0)
    seconds, cpu = time.perf_counter() - started, time.process_time() - used
    for ticket in range(READS):
        contestant.read(opened, ticket)
    barrier.wait()
    after = process.memory_full_info()
    barrier.wait()
    found.put((seconds, cpu, (after.uss - before.uss) / _MIB, (after.pss - before.pss) / _MIB))
    del opened


def open_in_processes(name: str, path: Path, processes: int = 1) -> Opened:
    """Open a file by a contestant in several processes at once."""
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(processes), context.Queue()
    workers = [context.Process(target=_measure, args=(name, str(path), barrier, found)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    results = [found.get(timeout=1800) for _ in workers]
    for worker in workers:
        worker.join()
    seconds, cpu, private, shared = zip(*results, strict=True)
    return Opened(max(seconds), max(cpu), sum(private), sum(shared))


def draws_per_second(path: Path, draws: int) -> dict[str, dict[str, float]]:
    """For each sampler, per second of CPU time: draws of rows, and training tasks, whose rows are read and parsed."""
    rates: dict[str, dict[str, float]] = {}
    for name in SAMPLERS:
        weights = {"easy": 2.0, "medium": 5.0, "hard": 3.0} if name == "ratio" else {}
        sampler = SamplerConfig(name, weights=weights)
        source = FileTaskSource(tasks_config(source="webgym", train_file=str(path), sampler=sampler))
        table = load_tasks(str(path), TRAIN_FILE, FORMATS["webgym"])
        tried = {task_unit(int(key)): PassRate(number % 9 / 8, 2) for number, key in enumerate(table.task_keys[:1000])}
        knowledge = SamplerKnowledge(passes=tried)
        rows = RowSampler(sampler, table.levels, table.website_ids, table.websites, table.task_keys)
        rows.draw(0, 0, knowledge)  # the first permutation
        source.training_task(0, 0, knowledge)
        rates[name] = {
            "rows": _rate(partial(rows.draw, 0), knowledge, draws),
            "tasks": _rate(partial(source.training_task, 0), knowledge, draws),
        }
        source.close()
    return rates


def _rate(draw: Callable[..., object], knowledge: object, draws: int) -> float:
    started = time.process_time()
    for ticket in range(draws):
        draw(ticket, knowledge)
    return draws / (time.process_time() - started)


def run(folder: Path, rows: int, draws: int) -> dict[str, Any]:
    """Measure everything on a generated file."""
    path = folder / "tasks.jsonl"
    write_file(path, rows)
    figures: dict[str, Any] = {
        "rows": rows,
        "file_mib": path.stat().st_size / _MIB,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "start": asdict(open_in_processes("table", path)),
        "node": asdict(open_in_processes("table", path, PROCESSES)),
        **{f"tried_{tried}": asdict(open_in_processes(f"tried_{tried}", path, PROCESSES)) for tried in TRIED},
        "json.loads": asdict(open_in_processes("json.loads", path)),
        "datasets_first": asdict(open_in_processes("datasets", path)),
        "datasets": asdict(open_in_processes("datasets", path)),
        "draws_per_second": draws_per_second(path, draws),
    }
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the figures as tables."""
    print(f"{figures['rows']:,} rows, {figures['file_mib']:.0f} MiB; {figures['machine']}\n")
    print("| | processes | seconds to the first task | of CPU | private MiB, all | with shared MiB, all |")
    print("|---|---|---|---|---|---|")
    lines = (
        ("start", "start", 1), ("start", "node", PROCESSES),
        *((f"start, {tried:,} tasks tried", f"tried_{tried}", PROCESSES) for tried in TRIED),
        ("json.loads of all lines", "json.loads", 1), ("`datasets`, first", "datasets_first", 1),
        ("`datasets`, later", "datasets", 1),
    )  # fmt: skip
    for label, key, processes in lines:
        found = figures[key]
        memory = f"{found['private_mib']:.0f} | {found['shared_mib']:.0f}"
        print(f"| {label} | {processes} | {found['seconds']:.3f} | {found['cpu_seconds']:.3f} | {memory} |")
    print("\nPer second of CPU time:\n")
    print("| sampler | rows drawn | tasks drawn and read |")
    print("|---|---|---|")
    for name, rates in figures["draws_per_second"].items():
        print(f"| `{name}` | {rates['rows']:,.0f} | {rates['tasks']:,.0f} |")
    met = (
        figures["start"]["seconds"] < START_SECONDS,
        max(figures[key]["shared_mib"] for key in ("node", *(f"tried_{tried}" for tried in TRIED))) < MEMORY_MIB,
        min(rates["rows"] for rates in figures["draws_per_second"].values()) >= DRAWS_PER_SECOND,
    )
    goals = (
        f"a start under {START_SECONDS:g} s", f"{PROCESSES} processes under {MEMORY_MIB:g} MiB",
        f"{DRAWS_PER_SECOND:,.0f} draws per CPU second",
    )  # fmt: skip
    print("\n" + "; ".join(f"{goal}: {'met' if each else 'missed'}" for goal, each in zip(goals, met, strict=True)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_bench_parser(__doc__, quick=f"{QUICK_ROWS:,} rows in place of {ROWS:,}")
    options = parser.parse_args(arguments)
    rows, draws = (QUICK_ROWS, DRAWS // 10) if options.quick else (ROWS, DRAWS)
    with tempfile.TemporaryDirectory(prefix="task-files-") as folder:
        figures = run(Path(folder), rows, draws)
    show(figures)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
