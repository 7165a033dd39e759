"""Cost of training on groups in the rings of two nodes instead of one: seconds per update, transferred bytes.

Two ranks with a ring each stand for two nodes on this machine. They take the same groups in three layouts: all groups
in one ring, as on one node; half of the groups in each of two rings; all groups in one of two rings. Connections are
loopback.

headers   the first rank reads the headers of all records; a job does this while it waits for groups
exchange  all ranks get the chosen groups; with one ring only the list of records
plan      the assignment of sequences to nodes
fetch     screenshots are sent to their assigned nodes
send      the same bytes by torch's send and recv, for comparison

    python -m tools.bench.nodes [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.model import platform as platforms
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import segment_name, sweep_segments
from megatron_webrl.types import Action, Step, Task, Trajectory
from megatron_webrl.util import torchvision_shim
from tools.arguments import make_bench_parser, write_json

RANKS, SECONDS = 2, 300.0
STEPS, SCREENSHOT_BYTES, WINDOW, TEXT_TOKENS, RESPONSE_TOKENS = 10, 150_000, 4, 1000, 200
"""Per episode: steps, bytes of a screenshot, screenshots in a prompt, its text tokens, response tokens."""
IMAGE_TOKENS = 960  # tokens of a screenshot of 1280x768
RING_LAYOUTS = {"one ring": None, "two rings, even": (0, 1), "two rings, one empty": (0, 0)}
"""Layout -> node of even and of odd groups; None: a job on one node."""


def episode(ticket: int, index: int, group_size: int) -> Trajectory:
    """A web-agent episode: ten steps with a window of four screenshots."""
    rng = np.random.default_rng((ticket, index))
    return Trajectory(
        ticket=ticket,
        index=index,
        group_size=group_size,
        restart_epoch=0,
        task=Task(f"bench/{ticket}", "sites", "bench", ticket, STEPS),
        instruction="Find the price.",
        steps=tuple(_step(rng, step) for step in range(STEPS)),
        images=tuple(rng.bytes(SCREENSHOT_BYTES) for _ in range(STEPS)),
        reward=float(index % 2),
        outcome="success" if index % 2 else "failure",
        temperature=1.0,
        seconds=60.0,
        finished_at=float(ticket),
        worker="rollout-0.1",
    )


def _step(rng: np.random.Generator, step: int) -> Step:
    shots = np.arange(max(0, step - WINDOW + 1), step + 1, dtype=np.int32)
    return Step(
        prompt_token_ids=rng.integers(0, 150_000, TEXT_TOKENS + IMAGE_TOKENS * len(shots)).astype(np.int32),
        response_token_ids=rng.integers(0, 150_000, RESPONSE_TOKENS).astype(np.int32),
        logprobs=-rng.random(RESPONSE_TOKENS).astype(np.float32),
        versions=np.zeros(RESPONSE_TOKENS, np.int32),
        images=shots,
        image_grids=np.tile(np.array([1, 48, 80], np.int32), (len(shots), 1)),
        finish_reason="stop",
        action=Action("wait"),
    )


class ExchangeBench:
    """One rank: its rings and its measurements."""

    def __init__(self, rank: int, names: Sequence[str], groups: int, group_size: int) -> None:
        from megatron_webrl.trainer.multi_node.rank_messages import NodeTopology, RankMessenger

        self.rank, self.groups, self.group_size = rank, groups, group_size
        self.rings = [Ring.attach(name) for name in names]
        self.config = Config()
        nodes = {1: NodeTopology.all_gather(0, 1), RANKS: NodeTopology.all_gather(rank, RANKS)}
        self.wires = {count: RankMessenger(topology, SECONDS, SECONDS) for count, topology in nodes.items()}

    def write_groups(self, homes: tuple[int, int]) -> None:
        """Write all groups to the rings, on the first rank."""
        if self.rank == 0:
            for ticket in range(self.groups):
                for index in range(self.group_size):
                    self.rings[homes[ticket % 2]].write(
                        encode_trajectory(episode(ticket, index, self.group_size)), SECONDS
                    )
        torch.distributed.barrier()

    def run_update(self, homes: tuple[int, int] | None) -> dict[str, float]:
        """One update in one layout: seconds of each part, and bytes."""
        from megatron_webrl.trainer.accounting import Accounting
        from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
        from megatron_webrl.trainer.data.group_source import GroupSource
        from megatron_webrl.trainer.multi_node.exchange import RecordExchange
        from megatron_webrl.trainer.multi_node.screenshots import ImageCache, ImageShard

        self.write_groups(homes or (0, 0))
        wire = self.wires[1 if homes is None else RANKS]
        cache, damaged = ImageCache(wire, ImageShard(self.rank, 0)), self.config.run_folder / "damaged_records"
        rings = RecordExchange(self.rings[wire.topology.node], wire, cache, damaged)
        source = GroupSource(rings, self.config, ResumePoint(), Accounting()) if self.rank == 0 else None
        begun = time.perf_counter()
        taken = None if source is None else source.wait_for_groups(0, self.groups, SECONDS, lambda ready: True)
        headers_read = time.perf_counter()
        groups = rings.broadcast_groups(taken)
        torch.distributed.barrier()
        exchanged = time.perf_counter()
        assert isinstance(groups, list)
        found = {"headers": headers_read - begun, "exchange": exchanged - headers_read}
        if homes is not None:
            found |= self._fetch_images(rings, groups)
        for group, numbers in taken or []:
            assert source is not None
            source.close_group(group, numbers)
        rings.finish_collecting()
        torch.distributed.barrier()
        return found

    def _fetch_images(self, rings: Any, groups: Sequence[Any]) -> dict[str, float]:
        from megatron_webrl.trainer.data.batching import training_samples
        from megatron_webrl.trainer.data.prefix_merging import unmerged_sequence
        from megatron_webrl.trainer.multi_node.screenshots import assign_to_nodes

        chains = [unmerged_sequence(sample) for sample in training_samples(groups, self.config, 0)]
        begun = time.perf_counter()
        parts = assign_to_nodes(chains, [float(chain.length) for chain in chains], rings.image_cache.replica_nodes)
        planned = time.perf_counter()
        wanted = {rank: [bytes(name) for i in part for name in chains[i].images] for rank, part in enumerate(parts)}
        torch.distributed.barrier()
        before = time.perf_counter()
        rings.image_cache.fetch(wanted)
        torch.distributed.barrier()
        after = time.perf_counter()
        figures = {
            "plan": planned - begun, "fetch": after - before, "moved": float(rings.image_cache.transferred_bytes),
            "local_fraction": 1 - rings.image_cache.transferred_bytes / rings.image_cache.needed_bytes,
            "other": rings.pop_metrics()["nodes/other_mib"] * 2**20,
        }  # fmt: skip
        return figures | {"send": self._send(int(figures["moved"]))}

    def _send(self, size: int) -> float:
        """Seconds that torch takes to send `size` bytes from one rank to the other."""
        if not size:
            return 0.0
        tensor = torch.zeros(size, dtype=torch.uint8)
        torch.distributed.barrier()
        begun = time.perf_counter()
        if self.rank == 0:
            torch.distributed.send(tensor, 1)
        else:
            torch.distributed.recv(tensor, 0)
        torch.distributed.barrier()
        return time.perf_counter() - begun


def run(rank: int, folder: str, names: Sequence[str], groups: int, group_size: int, rounds: int) -> None:
    """Body of a rank; the first one writes the medians to found.json."""
    torchvision_shim.install()
    torch.set_num_threads(1)
    backend = platforms.activate("cpu").backend
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=SECONDS),
    )
    bench = ExchangeBench(rank, names, groups, group_size)
    found: dict[str, list[dict[str, float]]] = {layout: [] for layout in RING_LAYOUTS}
    for _ in range(rounds):
        for layout, homes in RING_LAYOUTS.items():
            found[layout].append(bench.run_update(homes))
    if rank == 0:
        medians = {
            layout: {name: statistics.median(each[name] for each in each_round) for name in each_round[0]}
            for layout, each_round in found.items()
        }
        Path(folder, "found.json").write_text(json.dumps(medians))
    torch.distributed.destroy_process_group()


def measure(groups: int, group_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Medians of all figures by layout: seconds, bytes, fractions."""
    size = (
        2
        * groups
        * group_size
        * STEPS
        * (SCREENSHOT_BYTES + 4 * (TEXT_TOKENS + WINDOW * IMAGE_TOKENS + 3 * RESPONSE_TOKENS))
    )
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        names = [segment_name("bench-nodes", f"{os.getpid()}/{node}") for node in range(RANKS)]
        for name in names:
            ring = stack.enter_context(Ring.create_or_attach(name, size, name))
            stack.callback(ring.unlink)
        arguments = (folder, names, groups, group_size, rounds)
        torch.multiprocessing.start_processes(run, arguments, nprocs=RANKS, start_method="spawn")
        return json.loads(Path(folder, "found.json").read_text())


def table(results: dict[str, dict[str, float]]) -> str:
    """The figures as a table: milliseconds, MB, and the additional time of an update compared with one ring."""
    lines = [
        "| | headers ms | exchange ms | plan ms | fetch ms | exchange + plan + fetch, over one ring ms | moved MB "
        "| GB/s | of send alone | stay local | other MB |",
        "|---|" + "---:|" * 10,
    ]
    base = results["one ring"]["exchange"]
    for layout, each in results.items():
        total = each["exchange"] + each.get("plan", 0.0) + each.get("fetch", 0.0)
        cells = [f"{1e3 * each['headers']:.0f}", f"{1e3 * each['exchange']:.0f}"]
        if "fetch" in each:
            rate = each["moved"] / each["fetch"] / 1e9 if each["moved"] else None
            ratio = each["send"] / each["fetch"] if each["moved"] else None
            cells += [f"{1e3 * each['plan']:.0f}", f"{1e3 * each['fetch']:.0f}", f"{1e3 * (total - base):.0f}"]
            cells += [f"{each['moved'] / 1e6:.1f}", "" if rate is None else f"{rate:.2f}"]
            cells += [
                "" if ratio is None else f"{ratio:.2f}",
                f"{each['local_fraction']:.2f}",
                f"{each['other'] / 1e6:.1f}",
            ]
        else:
            cells += ["", "", "0", "0", "", "", "1.00", "0"]
        lines.append(f"| {layout} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = make_bench_parser(__doc__, "two small groups, one round")
    arguments = parser.parse_args()
    groups, group_size, rounds = (2, 2, 1) if arguments.quick else (16, 8, 3)
    sweep_segments("webrl-bench-nodes-")
    results = measure(groups, group_size, rounds)
    episodes = groups * group_size
    size = episodes * STEPS * SCREENSHOT_BYTES / 1e6
    print(
        f"{episodes} episodes of {STEPS} steps, {size:.0f} MB of screenshots; median of {rounds}; "
        f"{os.cpu_count()} CPUs, {platform.machine()}, torch {torch.__version__}\n"
    )
    print(table(results))
    if arguments.json:
        content = {"groups": groups, "group_size": group_size, "rounds": rounds, "results": results}
        write_json(arguments.json, content)


if __name__ == "__main__":
    main()
