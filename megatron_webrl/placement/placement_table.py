"""`webrl placement`: the table of processes, memory and predicted times."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.placement import memory_estimate, prediction
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.hardware import CARDS, Card
from megatron_webrl.placement.memory_estimate import GIB, MemoryEstimate, check_parallel_layout
from megatron_webrl.placement.performance.prediction import predict, print_prediction
from megatron_webrl.placement.placement import Placement, ProcessPlacement, gpu_memory_share, place_processes
from megatron_webrl.placement.prediction import EpisodeLengths
from megatron_webrl.util.text import count_noun


def show_placement(
    path: str, overrides: list[str], file: Path | None, with_memory: bool, console: Console, card: Card | None = None
) -> int:
    """Print the placement of a configuration and write it to `file` as JSON; returns the exit code.

    `with_memory`: with the estimated memory. `card`: with the predicted times on such GPUs.

    Raises ConfigError if the configuration cannot be placed. Reads no machine: the model, packages and browsers may be
    missing here.
    """
    config = parse_config(path, overrides)
    check_sections(config)
    description = find_model_config(config)
    if description is not None:
        check_parallel_layout(config, description)
    placement, content = place_processes(config), {}
    print_placement(config, placement, console)
    if (with_memory or card) and description is None:
        raise ConfigError(
            f"{'--memory' if with_memory else '--time'}: model.path={config.model.path} is no folder with a "
            "config.json, nor named as a released size is (Qwen3-VL-SIZE-Instruct or -Thinking, SIZE one of "
            f"{', '.join(parameter_counts.MODEL_SIZES)}; {', '.join(parameter_counts.QWEN3_5_NAMES)})"
        )
    if with_memory and description is not None:
        estimate = memory_estimate.estimate_memory(config, description)
        print_memory(config, estimate, console)
        start = prediction.estimate_start(config, estimate.parameters)
        for describe in (prediction.describe_start, prediction.describe_save):
            if line := describe(config, start):
                console.print(line, highlight=False, soft_wrap=True)
        content = {"memory": asdict(estimate), "start": asdict(start)}
    if card is not None and description is not None:
        predicted = predict(config, description, card, EpisodeLengths())
        print_prediction(config, predicted, console)
        content |= {"time": asdict(predicted)}
    if file is not None:
        try:
            file.write_text(json.dumps(placement.to_json() | content, indent=1) + "\n")
        except OSError as err:
            raise ConfigError(f"--json={file}: {err.strerror}; name a file in a folder that can be written") from err
    if with_memory:
        memory_estimate.check_memory(config, estimate)
    return 0


def find_model_config(config: Config) -> dict[str, Any] | None:
    """The model's config.json, else that of the released size in the path's name; None if there is neither."""
    if (Path(config.model.path) / "config.json").is_file():
        return read_model_config(config.model.path)
    size = parameter_counts.size_from_path(config.model.path)
    return None if size is None else parameter_counts.config_sections(size)


def print_placement(config: Config, placement: Placement, console: Console) -> None:
    """Print the processes by node, equal nodes in one block, then rings and process groups."""
    trainers, workers = placement.of_role("trainer"), [p for p in placement.of_role("rollout") if not p.follower]
    console.print(f"{config.run.name}: {_describe_nodes(config)}", markup=False, highlight=False)
    if trainers:
        console.print(f"trainer: {count_noun(len(trainers), 'rank')}, {_sizes(config)}", highlight=False)
    console.print(f"rollout: {count_noun(len(workers), 'engine')}, {_engine_sizes(config)}", highlight=False)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in ("nodes", "process", "number", "GPUs", "NICs", "cores", "port"):
        table.add_column(name, overflow="fold")
    for nodes in _equal_nodes(placement):
        for local, process in enumerate(placement.on_node(nodes[0])):
            everywhere = [placement.on_node(node)[local] for node in nodes]
            table.add_row(
                _numbers(nodes) if local == 0 else "",
                "trainer rank" if process.role == "trainer" else "worker" + (", follower" if process.follower else ""),
                _numbers([each.index for each in everywhere]),
                format_cores(process.devices) or "-",
                ",".join(process.nics) or "-",
                format_cores(process.cores) or "any",
                str(process.port),
            )
        table.add_section()
    console.print(table)
    console.print(f"control service: node 0, port {placement.control_port}", highlight=False)
    for line in (*_ring_lines(placement), *_group_lines(config, placement)):
        console.print(line, highlight=False, soft_wrap=True)


def print_memory(config: Config, estimate: MemoryEstimate, console: Console) -> None:
    """Print the estimate, GiB per GPU."""
    uses = (*estimate.trainer, estimate.engine)
    columns = [name for name in uses[0].components if any(use.components[name] for use in uses)]
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    digits = 1 if config.cluster.gpus_per_node else 3
    gib, shared = config.cluster.gpu_gib, config.cluster.colocate and len(uses) > 1
    limit = f"of {gib:g}" if config.cluster.gpus_per_node else ""
    for name in ("GiB of a GPU" if limit else "GiB of a process", *(name.replace("_", " ") for name in columns), "sum"):
        table.add_column(name, justify="left" if name.startswith("GiB") else "right")
    table.add_column(limit)
    for use in uses:
        row = [f"{use.components[name] / GIB:.{digits}f}" if use.components[name] else "" for name in columns]
        share = gpu_memory_share(config, use.role)
        verdict = ("fits" if use.total <= share * gib * GIB else "too much") if limit else ""
        verdict += f" its {share * gib:.1f}" if shared else ""
        table.add_row(use.role, *row, f"{use.total / GIB:.{digits}f}", verdict)
    if shared:
        total = max(use.total for use in estimate.trainer) + estimate.engine.total
        fits = "fits" if total <= gib * GIB else "too much"
        table.add_row("both on one GPU", *[""] * len(columns), f"{total / GIB:.{digits}f}", fits)
    console.print(table)
    rollout = config.rollout
    console.print(f"model: {estimate.parameters:,} parameters", highlight=False)
    if estimate.kv_cache_tokens:
        console.print(
            f"KV cache of an engine: {estimate.kv_cache_tokens} tokens, "
            f"{estimate.kv_cache_tokens // rollout.max_model_len} contexts of {rollout.max_model_len} "
            f"(it has up to {rollout.groups_in_flight * rollout.group_size} episodes)",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    console.print("estimate; docs/slurm.md lists its assumptions", style="dim")


def _describe_nodes(config: Config) -> str:
    cluster = config.cluster
    nodes, whole = count_noun(cluster.nodes, "node"), config.evaluation.only
    if not cluster.gpus_per_node:
        return f"{nodes} without GPUs"
    engines = "all" if whole else cluster.engine_gpus_per_node
    use = "shared by trainer and engines" if cluster.colocate and not whole else f"{engines} for engines"
    return f"{nodes} of {count_noun(cluster.gpus_per_node, 'GPU')}, {use}"


def _sizes(config: Config) -> str:
    trainer = config.trainer
    return (
        f"tp {trainer.tensor_parallel}, cp {trainer.context_parallel}, ep {trainer.expert_parallel}, "
        f"dp {trainer.data_parallel}, pp {trainer.pipeline_parallel}"
    )


def _engine_sizes(config: Config) -> str:
    return f"tp {config.rollout.tensor_parallel}, pp {config.rollout.pipeline_parallel}"


def _equal_nodes(placement: Placement) -> list[list[int]]:
    """Groups of nodes whose processes are equal except for their numbers, ordered by first node."""
    kinds: dict[Any, list[int]] = {}
    for node in range(placement.nodes):
        kind = tuple(
            (p.role, p.local_rank, p.devices, p.cores, p.nics, p.port, p.follower) for p in placement.on_node(node)
        )
        kinds.setdefault(kind, []).append(node)
    return list(kinds.values())


def _numbers(numbers: Sequence[int]) -> str:
    """Numbers in short: a range as 0-15, up to four in full, else first, second and last, with the step if even."""
    steps = {b - a for a, b in pairwise(numbers)}
    if steps == {1}:
        return format_cores(numbers)
    if len(numbers) <= 4:
        return " ".join(map(str, numbers))
    step = f" by {steps.pop()}" if len(steps) == 1 else ""
    return f"{numbers[0]} {numbers[1]} .. {numbers[-1]}{step}"


def _ring_lines(placement: Placement) -> list[str]:
    if not placement.rings:
        return []
    first = placement.rings[0]
    lines = [f"ring of node 0: {first.name}, written by workers {format_cores(first.workers)}"]
    if unused := [ring.node for ring in placement.rings if not ring.workers]:
        lines.append(f"rings of nodes {_numbers(unused)} have no writer: their GPUs belong to engines of other nodes")
    return lines


def _group_lines(config: Config, placement: Placement) -> list[str]:
    """One line per kind of process group: over how many nodes it spreads."""
    engines: dict[int, list[ProcessPlacement]] = {}
    for process in placement.of_role("rollout"):
        engines.setdefault(process.index, []).append(process)
    line = f"engines of {config.ranks_per_engine}: {_over_nodes(list(engines.values()))}"
    return [*_trainer_group_lines(config, placement), line]


def _trainer_group_lines(config: Config, placement: Placement) -> list[str]:
    by_rank = placement.of_role("trainer")
    if not by_rank:
        return []
    share = len(by_rank) // config.trainer.pipeline_parallel
    blocks = placement.blocks
    lines = [f"tensor-parallel groups of {blocks.tensor}: each inside a node"]
    stage = [by_rank[first : first + blocks.stage] for first in range(0, share, blocks.stage)]
    if blocks.stage > blocks.tensor:
        shared = "all experts" if blocks.stage > blocks.context else "the tokens of a packed sequence"
        lines.append(f"groups of {blocks.stage} that share {shared}: {_over_nodes(stage)}")
    stages = range(config.trainer.pipeline_parallel)
    copies = [
        [by_rank[s * share + first + i] for s in stages for i in range(blocks.stage)]
        for first in range(0, share, blocks.stage)
    ]
    lines.append(f"copies of the model of {blocks.model_copy}: {_over_nodes(copies)}")
    return lines


def _over_nodes(groups: Sequence[Sequence[ProcessPlacement]]) -> str:
    spans = {len({process.node for process in group}) for group in groups}
    if spans == {1}:
        return "each inside a node"
    low, high = min(spans), max(spans)
    return f"each over {low} nodes" if low == high else f"over {low} to {high} nodes"


def add_placement(commands: Any) -> None:
    """Add `placement` to the commands of `webrl`."""
    placement = commands.add_parser(
        "placement",
        help="show which process runs where on a cluster, and estimate its memory",
        description="Place the processes of a configuration on the machines it describes (cluster.*): nodes, GPUs, "
        "cores, ports, rings. Reads the configuration only, no machine. Exit code 2: impossible. docs/slurm.md",
        epilog="example: webrl placement configs/8b_32node.yaml cluster.nodes=16 --memory",
    )
    placement.add_argument("config", help="YAML file")
    placement.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the file")
    placement.add_argument("--json", type=Path, metavar="FILE", help="also write every process to this file")
    placement.add_argument(
        "--memory", action="store_true", help="estimate the memory of each GPU; an error if it does not fit"
    )
    placement.add_argument(
        "--time", action="store_true", help="predict the seconds of an update's parts; docs/performance.md"
    )
    placement.add_argument("--card", choices=tuple(CARDS), help="with --time: the GPU (default: H100)")
    placement.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    if options.card and not options.time:
        raise ConfigError("--card names the GPU of --time; add --time")
    card = CARDS[options.card or "H100"] if options.time else None
    console = Console(width=None if sys.stdout.isatty() else 140)
    return show_placement(options.config, options.overrides, options.json, options.memory, console, card)
