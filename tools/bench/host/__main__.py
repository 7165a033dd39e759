"""What the host of a trainer rank does for an update, and how long the device waits for it.

One rank of a configuration plays an update by itself: the groups come from a ring, are assigned to micro-batches and
packed; image workers decode real screenshots of 1280x768; metrics, accounting and the episode log close the update. All
of this is the trainer's code. The device is simulated: a micro-batch takes the predicted seconds of the card, and each
of its operations is launched first, at the cost that launches.py measures.

Host and device have one clock (device.py), of CPU seconds of the host and predicted ones of the device.
The device waits while it has nothing to compute; the host waits for it where it reads a value, and while as many
operations as a CUDA stream holds are launched and not computed.

    python -m tools.bench.host [--config-name 8b_1node] [--card H100] [--quick] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import gc
import os
import platform as machine
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.model import parameter_counts
from megatron_webrl.placement.hardware import CARDS
from megatron_webrl.placement.memory_estimate import resolve_automatic
from megatron_webrl.placement.model_shape import ModelShape
from megatron_webrl.placement.prediction import TrainingBatch
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import segment_name, sweep_segments
from megatron_webrl.util import torchvision_shim
from tools.arguments import make_bench_parser, write_json
from tools.bench.host.groups import LENGTHS, make_groups
from tools.bench.host.launches import BatchSize, Launches, count_launches
from tools.bench.host.update import RECORD_SECONDS, HostBench, HostResult

ROOT = Path(__file__).resolve().parents[3]
GOAL = 0.02  # of an update that the device may wait
DENSE = ("2B", "4B", "8B", "32B")  # sizes of Qwen3-VL


def measure(config: Config, size: str, card: str, quick: bool) -> tuple[HostResult, Launches]:
    """One update of rank 0 of `config`; `quick`: of a group of two episodes."""
    groups, group_size = (1, 2) if quick else (config.trainer.groups_per_update, config.rollout.group_size)
    launches = count_launches(size, config, _mean_batch(config, size))
    sweep_segments("webrl-bench-host-")
    with tempfile.TemporaryDirectory(prefix="webrl-bench-") as folder, ExitStack() as stack:
        bench = HostBench(Path(folder), config, size, card, launches)
        stack.callback(bench.close)
        made = make_groups(bench.processor, groups, group_size, config.rollout.context.history_turns)
        records = [encode_trajectory(each) for group in made for each in group]
        name = segment_name("bench-host", str(os.getpid()))
        ring_bytes = 2 * sum(memoryview(part).nbytes for record in records for part in record)
        ring = stack.enter_context(Ring.create_or_attach(name, ring_bytes, name))
        stack.callback(ring.unlink)
        for record in records:
            ring.write(record, RECORD_SECONDS)
        gc.collect()
        gc.freeze()  # as the trainer does
        return bench.run(ring, groups), launches


def _mean_batch(config: Config, size: str) -> BatchSize:
    """The mean micro-batch that is predicted."""
    model = ModelShape.from_description(parameter_counts.config_sections(size))
    batch = TrainingBatch.of_config(config, LENGTHS, model)
    _, shape = batch.microbatches(config)
    sequences = max(1, round(shape.scored / batch.scored))
    images = max(1, round(shape.patches / batch.screenshot_patches))
    return BatchSize(round(shape.tokens), sequences, round(batch.shared), round(shape.scored), images)


def show(result: HostResult, launches: Launches) -> None:
    """Print the tables."""
    thousand = result.tokens / 1000
    print("| part | CPU s of the host | ms a 1,000 tokens | device waits, s |")
    print("|---|---:|---:|---:|")
    for name, seconds in result.host.items():
        print(f"| {name} | {seconds:.3f} | {1e3 * seconds / thousand:.2f} | |")
    print(f"| launches | {result.launching:.3f} | {1e3 * result.launching / thousand:.2f} | |")
    for name, seconds in result.idle.items():
        print(f"| idle: {name} | | | {seconds:.3f} |")
    cut = result.images * result.worker_seconds
    print(f"\nimage workers: {result.images} screenshots, {1e3 * result.worker_seconds:.1f} CPU ms each, {cut:.2f} s; "
          f"the host waits {result.image_wait:.3f} s for them")  # fmt: skip
    for name, operations, device in (
        ("forward pass", launches.score, result.score_seconds),
        ("forward and backward pass", launches.train, result.train_seconds),
    ):
        seconds = operations * launches.seconds
        share = f", {seconds / device:.0%} of the device's {device:.2f} s" if device else ""
        print(f"{name} of a micro-batch: {operations:,.0f} operations x {1e6 * launches.seconds:.1f} us = "
              f"{seconds:.2f} s of the host{share}")  # fmt: skip
    state = "met" if result.waited < GOAL else "missed"
    print(f"device computes {result.busy:.1f} s, waits {sum(result.idle.values()):.2f} s: {result.waited:.2%} "
          f"(goal: under {GOAL:.0%}, {state})")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_bench_parser(__doc__, "a group of two episodes")
    parser.add_argument("--config-name", default="8b_1node", metavar="NAME", help="configuration (default: 8b_1node)")
    parser.add_argument("--card", choices=tuple(CARDS), default="H100", help="(default: H100)")
    options = parser.parse_args(arguments)
    torchvision_shim.install()
    torch.set_num_threads(1)
    config = parse_config(str(ROOT / "configs" / f"{options.config_name}.yaml"), [])
    size = parameter_counts.size_from_path(config.model.path)
    if size not in DENSE or config.trainer.pipeline_parallel > 1:
        print(f"host: {options.config_name} is not a dense Qwen3-VL on one pipeline stage", file=sys.stderr)
        return 2
    config = resolve_automatic(config, parameter_counts.config_sections(size))
    result, launches = measure(config, size, options.card, options.quick)
    trainer = config.trainer
    print(
        f"{options.config_name}, rank 0 of {config.trainer_world_size}, {options.card} (predicted): "
        f"{result.microbatches} micro-batches of {result.tokens / result.microbatches:,.0f} tokens, "
        f"{trainer.epochs} epochs; {os.cpu_count()} CPUs, {machine.machine()}, torch {torch.__version__}, "
        f"load {os.getloadavg()[0]:.0f}\n"
    )
    show(result, launches)
    if options.json:
        write_json(options.json, dataclasses.asdict(result) | {"waited": result.waited, "launches": vars(launches)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
