"""`webrl placement`: the table of processes, memory and predicted times."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.placement import memory_estimate
from megatron_webrl.placement.cores import format_cores
from megatron_webrl.placement.hardware import CARDS
from megatron_webrl.placement.memory_estimate import GIB, MemoryEstimate, check_parallel_layout
from megatron_webrl.placement.placement import (
    Placement,
    ProcessPlacement,
    RankBlocks,
    gpu_memory_share,
    place_processes,
)
from megatron_webrl.placement.prediction import EpisodeLengths, StartEstimate
from megatron_webrl.placement.search import DIMENSIONS, Step, search
from megatron_webrl.placement.throughput import Prediction, binding_limit, predict
from megatron_webrl.util.text import count_noun


def show_placement(options: argparse.Namespace) -> int:
    """Print the placement of a configuration and write it as JSON; returns the exit code.

    Raises ConfigError if the configuration cannot be placed. Reads no machine: the model, packages and browsers may be
    missing here.
    """
    given = {"card": options.card, "lengths": options.lengths or None, "search": options.search}
    for name, value in given.items():
        if value is not None and not options.time:
            raise ConfigError(f"--{name} is for --time; add --time")
    lengths, console = EpisodeLengths.from_words(options.lengths), Console(width=None if sys.stdout.isatty() else 140)
    config = parse_config(options.config, options.overrides)
    check_sections(config)
    description = find_model_config(config)
    if description is not None:
        check_parallel_layout(config, description)
    placement, content = place_processes(config), dict[str, Any]()
    print_placement(config, placement, console)
    estimate = None
    if options.memory or options.time:
        if description is None:
            raise ConfigError(
                f"{'--memory' if options.memory else '--time'}: model.path={config.model.path} is no folder with a "
                "config.json, nor named as a released size is (Qwen3-VL-SIZE-Instruct or -Thinking, SIZE one of "
                f"{', '.join(parameter_counts.MODEL_SIZES)}; {', '.join(parameter_counts.QWEN3_5_NAMES)})"
            )
        if options.memory:
            estimate = memory_estimate.estimate_memory(config, description)
            start = StartEstimate.of_config(config, estimate.parameters)
            print_memory(config, estimate, console)
            for line in start.lines(config):
                console.print(line, highlight=False, soft_wrap=True)
            content |= {"memory": asdict(estimate), "start": asdict(start)}
        if options.time:
            card = CARDS[options.card or "H100"]
            predicted = predict(config, description, card, lengths)
            print_prediction(config, predicted, console)
            content["time"] = asdict(predicted)
            if options.search is not None:
                with Status("searching", console=Console(stderr=True)) as status:
                    steps = search(config, description, card, lengths, options.search or DIMENSIONS,
                                   lambda name: status.update(f"searching: {name.replace('_', ' ')}"))  # fmt: skip
                print_search(steps, console)
                content["search"] = [asdict(step) for step in steps]
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(placement.to_json() | content, indent=1) + "\n")
        except OSError as err:
            raise ConfigError(f"--json={options.json}: {err.strerror}; name a file in a writable folder") from err
    if estimate is not None:
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
    trainer, rollout = config.trainer, config.rollout
    if trainers:
        console.print(
            f"trainer: {count_noun(len(trainers), 'rank')}, tp {trainer.tensor_parallel}, cp "
            f"{trainer.context_parallel}, ep {trainer.expert_parallel}, dp {trainer.data_parallel}, pp "
            f"{trainer.pipeline_parallel}",
            highlight=False,
        )
    sizes = f"tp {rollout.tensor_parallel}, pp {rollout.pipeline_parallel}"
    console.print(f"rollout: {count_noun(len(workers), 'engine')}, {sizes}", highlight=False)
    table = _make_table()
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
    for line in _group_lines(config, placement):
        console.print(line, highlight=False, soft_wrap=True)


def print_memory(config: Config, estimate: MemoryEstimate, console: Console) -> None:
    """Print the estimate, GiB per GPU."""
    uses = (*estimate.trainer, estimate.engine)
    columns = [name for name in uses[0].components if any(use.components[name] for use in uses)]
    table = _make_table()
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


def print_prediction(config: Config, prediction: Prediction, console: Console) -> None:
    """Print predicted times in at most 100 columns."""
    training, generation, job = prediction.training, prediction.generation, prediction.job
    lines = []
    if training is not None:
        console.print(_parts_table(f"training, {prediction.card}", "s an update", training.parts))
        checkpoint = f"a checkpoint holds training for {_number(training.checkpoint_seconds)} s"
        if training.checkpoint_every:
            checkpoint += f", every {training.checkpoint_every} updates"
        lines = [
            f"MFU {training.mfu:.1%}, {training.tokens_per_second_per_gpu:,.0f} trained tokens/s a GPU, "
            f"{training.operations / training.train_seconds / training.ranks / 1e12:.0f} TFLOP/s a GPU",
            f"{training.microbatches} micro-batches of {training.microbatch_tokens:,.0f} tokens a replica and "
            f"minibatch, {training.tokens:,.0f} tokens an update",
            f"collectives behind computation {_number(training.hidden_seconds)} s; "
            f"weight sync {_number(training.sync_seconds)} s",
            checkpoint,
            f"memory {prediction.trainer_gib:.0f} GiB of a trainer's GPU, {prediction.engine_gib:.0f} GiB of an "
            "engine's",
        ]
    for line in lines:
        console.print(line, highlight=False)
    milliseconds = {name: 1000 * seconds for name, seconds in generation.parts.items()}
    console.print(_parts_table("generation", "ms a step of an episode", milliseconds))
    lines = [
        f"{generation.requests:.1f} requests an engine at a time, {1000 * generation.decode_seconds:.1f} ms a token, "
        f"prefix cache {generation.hit_rate:.0%} of {generation.prompt_tokens:,.0f} prompt tokens",
        f"engines that never wait: {generation.response_tokens_per_second:,.0f} response tokens/s, the episodes of an "
        f"update in {_number(generation.update_seconds)} s",
    ]
    if training is not None and job is not None:
        trained = training.tokens * job.updates_per_hour / 3600 / prediction.gpus
        lines += [
            "",
            f"the job: {job.per_hour:,.0f} trained trajectories/h, {prediction.per_gpu_hour:.1f} a GPU; "
            f"{trained:,.0f} trained tokens/s a GPU, of all {prediction.gpus}",
            f"an update every {_number(prediction.update_seconds)} s: the trainer waits for groups {job.waiting:.0%}, "
            f"trains {job.training:.0%}, sends weights {job.syncing:.0%}, "
            f"writes checkpoints {max(0.0, 1 - job.waiting - job.training - job.syncing):.0%}",
            f"engines have requests {1 - job.engines_idle:.0%} of the time and work at {job.engines_load:.0%} of their "
            f"most; {job.wasted:.0%} of their tokens are dropped"
            + (f", {job.masked:.0%} of the trained ones masked" if job.masked else ""),
            f"trained episodes are {job.staleness:.1f} versions old, at most {job.staleness_max}",
            f"limit: {binding_limit(config, prediction)}",
        ]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print("predicted, not measured; docs/scaling.md lists the assumptions", style="dim")


def print_search(steps: Sequence[Step], console: Console) -> None:
    """Print what each changed setting gains, and all of them as overrides."""
    columns = ("changed", "trajectories/h", "a GPU", "s an update", "trainer waits", "engines' load", "age", "MFU")
    table, settings = _make_table(*columns, left="changed"), dict[str, Any]()
    for step in steps:
        settings |= step.changed
        found = step.prediction
        assert found.job is not None
        assert found.training is not None
        table.add_row(
            "\n".join(f"{name}={value}" for name, value in step.changed.items()) or "as configured",
            f"{found.job.per_hour:,.0f}", f"{found.per_gpu_hour:.1f}", f"{found.update_seconds:.0f}",
            f"{found.job.waiting:.0%}", f"{found.job.engines_load:.0%}", f"{found.job.staleness:.1f}",
            f"{found.training.mfu:.0%}",
        )  # fmt: skip
    console.print(table)
    first, last = steps[0].prediction.job, steps[-1].prediction.job
    assert first is not None
    assert last is not None
    console.print(f"{last.per_hour / first.per_hour:.2f} times as many trajectories; predicted, not measured")
    console.print(" ".join(f"{name}={value}" for name, value in settings.items()), soft_wrap=True, highlight=False)


def _make_table(*columns: str, left: str = "") -> Table:
    """An empty table; column `left` holds words, the others numbers."""
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=0, collapse_padding=False)
    for name in columns:
        table.add_column(name, justify="left" if name == left else "right")
    return table


def _parts_table(title: str, unit: str, parts: Mapping[str, float]) -> Table:
    """A table of parts with their shares and their sum."""
    table, total = _make_table(title, unit, "share", left=title), sum(parts.values())
    for name, value in parts.items():
        table.add_row(name, _number(value), f"{value / total:.1%}")
    table.add_row("sum", _number(total), "")
    return table


def _number(value: float) -> str:
    """Three significant digits at least, none after the point from 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _describe_nodes(config: Config) -> str:
    cluster = config.cluster
    nodes, whole = count_noun(cluster.nodes, "node"), config.evaluation.only
    if not cluster.gpus_per_node:
        return f"{nodes} without GPUs"
    engines = "all" if whole else cluster.engine_gpus_per_node
    use = "shared by trainer and engines" if cluster.colocate and not whole else f"{engines} for engines"
    return f"{nodes} of {count_noun(cluster.gpus_per_node, 'GPU')}, {use}"


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


def _group_lines(config: Config, placement: Placement) -> Iterator[str]:
    """Rings, and over how many nodes each kind of process group spreads."""
    if placement.rings:
        first = placement.rings[0]
        yield f"ring of node 0: {first.name}, written by workers {format_cores(first.workers)}"
    if unused := [ring.node for ring in placement.rings if not ring.workers]:
        yield f"rings of nodes {_numbers(unused)} have no writer: their GPUs belong to engines of other nodes"
    if ranks := placement.of_role("trainer"):
        blocks, stages = RankBlocks.from_config(config), config.trainer.pipeline_parallel
        share = len(ranks) // stages
        copies = [
            [ranks[stage * share + first : stage * share + first + blocks.stage] for stage in range(stages)]
            for first in range(0, share, blocks.stage)
        ]
        yield f"tensor-parallel groups of {blocks.tensor}: each inside a node"
        if blocks.stage > blocks.tensor:
            shared = "all experts" if blocks.stage > blocks.context else "the tokens of a packed sequence"
            yield f"groups of {blocks.stage} that share {shared}: {_over_nodes([copy[0] for copy in copies])}"
        yield f"copies of the model of {blocks.model_copy}: {_over_nodes([sum(copy, ()) for copy in copies])}"
    engines: dict[int, list[ProcessPlacement]] = {}
    for process in placement.of_role("rollout"):
        engines.setdefault(process.index, []).append(process)
    yield f"engines of {config.ranks_per_engine}: {_over_nodes(list(engines.values()))}"


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
        "--time", action="store_true", help="predict the seconds of an update's parts; docs/scaling.md"
    )
    placement.add_argument("--card", choices=tuple(CARDS), help="with --time: the GPU (default: H100)")
    placement.add_argument(
        "--lengths", nargs="+", default=[], metavar="NAME=X",
        help=f"with --time: lengths of episodes: {', '.join(field.name for field in fields(EpisodeLengths))}",
    )  # fmt: skip
    placement.add_argument(
        "--search", nargs="*", choices=(*DIMENSIONS, "batch"),
        help="with --time: change one setting after the other to what trains most trajectories an hour; without a name "
        "all but batch, which changes what an update learns from",
    )  # fmt: skip
    placement.set_defaults(run=show_placement)
