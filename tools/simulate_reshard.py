"""Predict the duration of a weight transfer on a cluster from the transfer plan and the link speeds.

For each released Qwen3-VL size the tool makes the same transfer plan as a run, and adds every byte to the links it
uses: within a node the NVLink ports of sender and receiver, between nodes their NICs. Each direction of a port is a
link of its own.

  seconds = max over links of (bytes / speed) + latency x (most messages of one rank)

Everything else (packing, the engine's own processing of a layer, congestion between NICs) costs nothing;
--efficiency sets the fraction of the link speed that transfers reach. Weights are bfloat16.

The broadcast is the usual alternative: the first trainer rank gathers the full model and passes it around a ring of
all engine ranks, node by node, with perfect overlap. NeMo-RL's seconds are published measurements of whole
transfers; compared with them, a prediction from link speeds is a lower bound.

Trainer and engines share every node, each with its own GPUs, or with --trainer-nodes have nodes of their own. Layouts
are written as tp4-pp8-ep16 (trainer: tp, pp, vpp, ep, etp, cp) and tp8-pp2-ep (engines: tp, pp, ep for whole experts).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python tools/simulate_reshard.py`

from megatron_webrl.model import parameter_counts
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.weights.engine_map import EngineSizes
from tools.arguments import bounded_number, write_json
from tools.reshard_links import (
    ITEM_BYTES,
    ClusterSpec,
    ReshardLayout,
    make_transfer_plan,
    place_ranks,
    predict_broadcast,
    predict_shard_to_shard,
)

GIGA = 1e9

NEMO_RL_SECONDS = {"4B": (0.21, 0.34), "30B-A3B": (0.74, 1.00)}
"""Published range for Megatron to vLLM, shard to shard, on H100 in bfloat16; measured, whole transfers."""


def _trainer(text: str) -> ParallelSizes:
    names = {
        "tp": "tensor",
        "pp": "pipeline",
        "vpp": "virtual",
        "ep": "expert",
        "etp": "expert_tensor",
        "cp": "context",
    }
    found: dict[str, int] = {}
    for part in text.lower().split("-"):
        match = re.fullmatch(r"(tp|pp|vpp|ep|etp|cp)([1-9]\d*)", part)
        if not match:
            raise ValueError(f"trainer layout {text!r}: {part!r} is none of tp, pp, vpp, ep, etp, cp with a number")
        found[names[match[1]]] = int(match[2])
    return ParallelSizes(**found)


def _engine(text: str) -> EngineSizes:
    sizes = EngineSizes()
    for part in text.lower().split("-"):
        match = re.fullmatch(r"(tp|pp)([1-9]\d*)|ep", part)
        if not match:
            raise ValueError(f"engine layout {text!r}: {part!r} is none of tp and pp with a number, and ep without")
        if match[1] is None:
            sizes = replace(sizes, expert_parallel=True)
        else:
            size = int(match[2])
            sizes = replace(sizes, tensor=size) if match[1] == "tp" else replace(sizes, pipeline=size)
    return sizes


DEFAULT_LAYOUTS: dict[str, tuple[tuple[int, str, str], ...]] = {
    "2B": ((1, "tp1", "tp1"),),
    "4B": ((1, "tp2", "tp1"),),
    "8B": ((1, "tp2", "tp1"),),
    "32B": ((4, "tp4-pp2", "tp2"), (32, "tp4", "tp2")),
    "30B-A3B": ((4, "tp2-pp2-ep4", "tp2"), (32, "tp2-ep4", "tp2")),
    "235B-A22B": ((32, "tp4-pp8-ep16", "tp4-pp2"),),
}
"""(least number of nodes, trainer, engines) that fit GPUs of 80 GB, half of each node for the trainer."""


def simulate(name: str, layout: ReshardLayout, cluster: ClusterSpec, staging_bytes: int) -> dict[str, Any]:
    """All figures of one size as plain values, in bytes and seconds. Raises ValueError for layouts that do not fit."""
    description, placement = parameter_counts.make_hf_config(name), place_ranks(cluster, layout)
    plan = make_transfer_plan(description, layout, placement, staging_bytes)
    load = plan.bytes_by_sender()
    mean = sum(load.values()) / len(load)
    ours = predict_shard_to_shard(plan, cluster, placement)
    rival = predict_broadcast(description, layout, cluster, placement, staging_bytes)
    return {
        "size": name,
        "layout": asdict(layout),
        "trainer_ranks": len(placement.trainer),
        "engines": len(placement.engines),
        "model_bytes": sum(math.prod(shape) for _, shape in plan.tensors) * ITEM_BYTES,
        "largest_rank_bytes": max(plan.received_bytes(0, rank) for rank in range(layout.engine.ranks)),
        "busiest_sender_to_mean": max(load.values()) / mean,
        "max_message_bytes": plan.max_message_bytes,
        "shard_to_shard": asdict(ours) | {"busiest": str(ours.busiest)},
        "broadcast": asdict(rival) | {"busiest": str(rival.busiest)},
        "nemo_rl_seconds": NEMO_RL_SECONDS.get(name),
    }


def default_layout(name: str, nodes: int) -> tuple[str, str]:
    """Default layouts of trainer and engines. Raises ValueError if the size needs more nodes."""
    fitting = [given for given in DEFAULT_LAYOUTS[name] if given[0] <= nodes]
    if not fitting:
        least = DEFAULT_LAYOUTS[name][0][0]
        raise ValueError(f"{name} has no default layout below {least} nodes: give --trainer and --engine")
    return max(fitting)[1:]


def layout_from_arguments(given: argparse.Namespace, name: str) -> ReshardLayout:
    """The layout from the command line, completed with the size's defaults."""
    trainer, engine = given.trainer, given.engine
    if trainer is None or engine is None:
        defaults = default_layout(name, given.nodes)
        trainer, engine = trainer or defaults[0], engine or defaults[1]
    gpus = given.gpus if given.trainer_nodes else given.trainer_gpus or max(given.gpus // 2, 1)
    return ReshardLayout(_trainer(trainer), _engine(engine), gpus, given.trainer_nodes)


def results_table(results: Sequence[Mapping[str, Any]], cluster: ClusterSpec) -> Table:
    """The results as a table."""
    made = Table(
        title=f"{cluster.nodes} nodes x {cluster.gpus} GPUs, {cluster.nics} NICs a node; "
        f"a link reaches {cluster.nvlink / GIGA:.0f} (NVLink) and {cluster.nic / GIGA:.0f} GB/s (NIC)"
    )
    columns = ("size", "trainer", "engines", "GB", "GB/rank", "seconds", "busiest link", "GB on it", "GB/NIC out|in")
    for column in (*columns, "broadcast s", "GB/NIC", "times", "NeMo-RL s"):
        made.add_column(column, justify="left" if column in ("size", "trainer", "engines", "busiest link") else "right")
    for result in results:
        ours, rival, published = result["shard_to_shard"], result["broadcast"], result["nemo_rl_seconds"]
        made.add_row(
            result["size"],
            f"{result['trainer_ranks']} x {_text(result['layout']['trainer'])}",
            f"{result['engines']} x {_text(result['layout']['engine'])}",
            f"{result['model_bytes'] / GIGA:.1f}",
            f"{result['largest_rank_bytes'] / GIGA:.1f}",
            f"{ours['seconds']:.3f}",
            ours["busiest"],
            f"{ours['busiest_bytes'] / GIGA:.2f}",
            f"{ours['nic_out'] / GIGA:.2f}|{ours['nic_in'] / GIGA:.2f}",
            f"{rival['seconds']:.2f}",
            f"{max(rival['nic_out'], rival['nic_in']) / GIGA:.1f}",
            f"{rival['seconds'] / ours['seconds']:.1f}",
            f"{published[0]:.2f}-{published[1]:.2f}" if published else "",
        )
    return made


def _text(sizes: Mapping[str, Any]) -> str:
    short = {
        "tensor": "tp",
        "pipeline": "pp",
        "virtual": "vpp",
        "expert": "ep",
        "expert_tensor": "etp",
        "context": "cp",
    }
    parts = [f"{short[name]}{size}" for name, size in sizes.items() if name in short and (size > 1 or name == "tensor")]
    return "-".join([*parts, *["ep"] * bool(sizes.get("experts"))])


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    count, speed = bounded_number(int, 1), bounded_number(float, 0, exclusive=True)
    made.add_argument(
        "--size", action="append", choices=list(parameter_counts.MODEL_SIZES), help="may be repeated (default: all)"
    )
    made.add_argument("--nodes", type=count, default=32, metavar="N", help="(default: 32)")
    made.add_argument("--gpus", type=count, default=8, metavar="N", help="of each node (default: 8)")
    made.add_argument("--nics", type=count, metavar="N", help="of each node (default: one for each GPU)")
    made.add_argument("--trainer", metavar="LAYOUT", help="such as tp4-pp8-ep16 (default: by size)")
    made.add_argument("--engine", metavar="LAYOUT", help="such as tp8-pp2-ep (default: by size)")
    made.add_argument("--trainer-gpus", type=count, metavar="N", help="of each node (default: half)")
    made.add_argument("--trainer-nodes", type=count, default=0, metavar="N", help="nodes of the trainer alone")
    made.add_argument("--nvlink", type=speed, default=450.0, metavar="GB/S", help="a GPU, a direction (default: 450)")
    made.add_argument("--nic", type=speed, default=50.0, metavar="GB/S", help="a NIC, a direction (default: 50)")
    made.add_argument(
        "--efficiency", type=speed, default=0.8, metavar="FRACTION", help="of these speeds (default: 0.8)"
    )
    made.add_argument(
        "--latency-us", type=bounded_number(float, 0), default=30.0, metavar="US", help="a message (default: 30)"
    )
    made.add_argument("--staging-mib", type=count, default=512, metavar="MIB", help="memory of a rank (default: 512)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write all figures to FILE")
    return made


def run(given: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Simulate and print the results. Raises ValueError for options that do not fit."""
    if given.trainer_nodes and given.trainer_gpus:
        raise ValueError("--trainer-nodes gives the trainer whole nodes: leave out --trainer-gpus")
    if given.efficiency > 1:
        raise ValueError(f"--efficiency={given.efficiency} is more than 1")
    nics = given.nics or given.gpus
    if nics > given.gpus:
        raise ValueError(f"--nics={nics} exceeds --gpus={given.gpus}: a GPU uses one NIC")
    speed = given.efficiency * GIGA
    cluster = ClusterSpec(
        given.nodes, given.gpus, nics, given.nvlink * speed, given.nic * speed, given.latency_us / 1_000_000
    )
    results = []
    for name in given.size or parameter_counts.MODEL_SIZES:
        try:
            layout = layout_from_arguments(given, name)
        except ValueError as error:
            if given.size:
                raise
            console.print(f"{error}; left out", style="dim")
            continue
        results.append(simulate(name, layout, cluster, given.staging_mib * 2**20))
    console.print(results_table(results, cluster))
    write_json(given.json, {"cluster": asdict(cluster), "results": results})
    return results


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 2 for layouts that do not fit or a file that cannot be written."""
    given = make_parser().parse_args(arguments)
    try:
        run(given, Console(width=None if sys.stdout.isatty() else 200))
    except (ValueError, OSError) as error:
        print(f"simulate_reshard: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
