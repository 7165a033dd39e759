"""`webrl placement CONFIG`: who runs where, and how much memory it needs, as tables a person can check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl import memory
from megatron_webrl.config import Config, ConfigError, read
from megatron_webrl.config_checks import check_limits, model_description
from megatron_webrl.config_layout import check_layout
from megatron_webrl.memory import GIB, Estimate
from megatron_webrl.model import released
from megatron_webrl.placement import Placement, Process, place
from megatron_webrl.placement_cores import format_cores


def show(path: str, overrides: list[str], file: Path | None, with_memory: bool, console: Console) -> int:
    """Print the placement of a configuration; `file` gets it as JSON. Raises ConfigError for what cannot be placed.

    Looks at no machine: models, packages and browsers need not be here.
    """
    config = read(path, overrides)
    check_limits(config, "")
    description = describe(config)
    if description is not None:
        check_layout(config, description)
    found, content = place(config), {}
    print_placement(config, found, console)
    if with_memory:
        if description is None:
            raise ConfigError(
                f"--memory: model.path={config.model.path} is no folder with a config.json, nor named as a released "
                f"size is (Qwen3-VL-SIZE-Instruct or -Thinking, SIZE one of {', '.join(released.SIZES)})"
            )
        estimate = memory.estimate(config, description)
        print_memory(config, estimate, console)
        content = {"memory": asdict(estimate)}
    if file is not None:
        try:
            file.write_text(json.dumps(found.to_json() | content, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(
                f"--json={file}: {error.strerror}; name a file in a folder that can be written"
            ) from error
    if with_memory:
        memory.check(config, estimate)
    return 0


def describe(config: Config) -> dict[str, Any] | None:
    """The model's config.json: the folder's, else that of the released size its name says; None if it says none."""
    if (Path(config.model.path) / "config.json").is_file():
        return model_description(config.model.path)
    size = released.size_named(config.model.path)
    return None if size is None else released.sections(size)


def print_placement(config: Config, found: Placement, console: Console) -> None:
    """The processes by node, nodes that are alike in one block, and what follows for rings and groups."""
    trainers, workers = found.of("trainer"), [each for each in found.of("rollout") if not each.part]
    console.print(f"{config.run.name}: {_machines(config)}", markup=False, highlight=False)
    console.print(f"trainer: {_count(len(trainers), 'rank')}, {_sizes(config)}", highlight=False)
    console.print(f"rollout: {_count(len(workers), 'engine')}, {_engine_sizes(config)}", highlight=False)
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in ("nodes", "process", "number", "GPUs", "NICs", "cores", "port"):
        table.add_column(name, overflow="fold")
    for nodes in _alike(found):
        for local, process in enumerate(found.on(nodes[0])):
            everywhere = [found.on(node)[local] for node in nodes]
            table.add_row(
                _numbers(nodes) if local == 0 else "",
                "trainer rank" if process.role == "trainer" else "worker" + (", further part" if process.part else ""),
                _numbers([each.number for each in everywhere]),
                format_cores(process.devices) or "-",
                ",".join(process.nics) or "-",
                format_cores(process.cores) or "any",
                str(process.port),
            )
        table.add_section()
    console.print(table)
    console.print(f"control plane: node 0, port {found.control_port}", highlight=False)
    for line in (*_ring_lines(found), *_group_lines(config, found)):
        console.print(line, highlight=False, soft_wrap=True)


def print_memory(config: Config, found: Estimate, console: Console) -> None:
    """The estimate, GiB of one GPU."""
    uses = (*found.trainer, found.engine)
    columns = [name for name in uses[0].parts if any(use.parts[name] for use in uses)]
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    digits = 1 if config.cluster.gpus else 3
    card = f"of {config.cluster.gpu_gib:g}" if config.cluster.gpus else ""
    for name in ("GiB of a GPU" if card else "GiB of a process", *(name.replace("_", " ") for name in columns), "sum"):
        table.add_column(name, justify="left" if name.startswith("GiB") else "right")
    table.add_column(card)
    for use in uses:
        parts = [f"{use.parts[name] / GIB:.{digits}f}" if use.parts[name] else "" for name in columns]
        fits = use.total <= config.cluster.gpu_gib * GIB
        table.add_row(
            use.who, *parts, f"{use.total / GIB:.{digits}f}", ("fits" if fits else "too much") if card else ""
        )
    console.print(table)
    rollout = config.rollout
    console.print(f"model: {found.parameters:,} parameters", highlight=False)
    if found.cached_tokens:
        console.print(
            f"KV cache of an engine: {found.cached_tokens} tokens, "
            f"{found.cached_tokens // rollout.max_model_len} contexts of {rollout.max_model_len} "
            f"(it has up to {rollout.groups_in_flight * rollout.group_size} episodes)",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    console.print("an estimate: docs/slurm.md says what is assumed", style="dim")


def _machines(config: Config) -> str:
    cluster = config.cluster
    nodes = _count(cluster.nodes, "node")
    return (
        f"{nodes} of {cluster.gpus} GPUs, {cluster.engine_gpus} for engines"
        if cluster.gpus
        else f"{nodes} without GPUs"
    )


def _sizes(config: Config) -> str:
    trainer = config.trainer
    return (
        f"tp {trainer.tensor_parallel}, cp {trainer.context_parallel}, ep {trainer.expert_parallel}, "
        f"dp {trainer.data_parallel}, pp {trainer.pipeline_parallel}"
    )


def _engine_sizes(config: Config) -> str:
    return f"tp {config.rollout.tensor_parallel}, pp {config.rollout.pipeline_parallel}"


def _alike(found: Placement) -> list[list[int]]:
    """Nodes whose processes differ by their numbers alone, by their first one."""
    kinds: dict[Any, list[int]] = {}
    for node in range(found.nodes):
        kind = tuple((p.role, p.local, p.devices, p.cores, p.nics, p.port, p.part) for p in found.on(node))
        kinds.setdefault(kind, []).append(node)
    return list(kinds.values())


def _numbers(numbers: Sequence[int]) -> str:
    """A run as 0-15, few as they are, evenly spaced ones by their step, others by their first and last."""
    steps = {b - a for a, b in pairwise(numbers)}
    if steps == {1}:
        return format_cores(numbers)
    if len(numbers) <= 4:
        return " ".join(map(str, numbers))
    step = f" by {steps.pop()}" if len(steps) == 1 else ""
    return f"{numbers[0]} {numbers[1]} .. {numbers[-1]}{step}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ring_lines(found: Placement) -> list[str]:
    first = found.rings[0]
    lines = [f"ring of node 0: {first.name}, written by workers {format_cores(first.workers)}"]
    if silent := [ring.node for ring in found.rings if not ring.workers]:
        lines.append(f"nothing writes to the rings of nodes {_numbers(silent)}: their GPUs serve engines of others")
    return lines


def _group_lines(config: Config, found: Placement) -> list[str]:
    """How many nodes each kind of group is on."""
    by_rank = found.of("trainer")
    share = len(by_rank) // config.trainer.pipeline_parallel
    blocks = found.blocks
    lines = [f"tensor-parallel groups of {blocks.tensor}: each inside a node"]
    stage = [by_rank[first : first + blocks.stage] for first in range(0, share, blocks.stage)]
    if blocks.stage > blocks.tensor:
        what = "all experts" if blocks.stage > blocks.context else "a row's tokens"
        lines.append(f"groups of {blocks.stage} that share {what}: {_over_nodes(stage)}")
    stages = range(config.trainer.pipeline_parallel)
    copies = [
        [by_rank[s * share + first + i] for s in stages for i in range(blocks.stage)]
        for first in range(0, share, blocks.stage)
    ]
    lines.append(f"copies of the model of {blocks.copy}: {_over_nodes(copies)}")
    engines: dict[int, list[Process]] = {}
    for process in found.of("rollout"):
        engines.setdefault(process.number, []).append(process)
    lines.append(f"engines of {config.engine_ranks}: {_over_nodes(list(engines.values()))}")
    return lines


def _over_nodes(groups: Sequence[Sequence[Process]]) -> str:
    spans = {len({process.node for process in group}) for group in groups}
    if spans == {1}:
        return "each inside a node"
    low, high = min(spans), max(spans)
    return f"each over {low} nodes" if low == high else f"over {low} to {high} nodes"
