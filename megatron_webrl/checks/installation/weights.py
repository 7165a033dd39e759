"""`webrl doctor --weights`: run the weight sync of a configuration and report its transfers."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.config.schema import Config
from megatron_webrl.launch.local import run_here


def check_weight_sync(config: Config, console: Console, *, as_json: bool = False) -> int:
    """Send weights without training and compare every slice, in a run "<run.name>-weights"; returns the exit code."""
    config = weight_sync_config(config)
    progress = Console(stderr=True) if as_json else console
    code = run_here(config, progress, weights_only=True)
    if code:
        return code
    report = json.loads((config.run_folder / "weights.json").read_text())
    if as_json:
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
    else:
        _print(report, console)
    return 0


def weight_sync_config(config: Config) -> Config:
    """The configuration of the check: a run of its own that waits for all engines and has no checkpoints."""
    trainer = replace(config.trainer, checkpoint=replace(config.trainer.checkpoint, fallback_folder=""))
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-weights", resume=False),
        rollout=replace(config.rollout, min_engines=config.rollout.engines),
        trainer=trainer,
        weights=replace(config.weights, verify=True),
    )


def _print(report: dict[str, Any], console: Console) -> None:
    transfers = Table(header_style="bold", box=box.SIMPLE_HEAD, title="transfers", title_justify="left")
    for name in ("transfer", "seconds", "GiB", "GiB/s", "longest pause, s"):
        transfers.add_column(name, justify="right")
    for number, metrics in enumerate(report["transfers"], 1):
        values = [metrics[key] for key in ("seconds", "weights/gib", "weights/gib_per_second", "weights/pause_seconds")]
        transfers.add_row(str(number), *(f"{value:.3f}" for value in values))
    console.print(transfers)
    ranks = Table(header_style="bold", box=box.SIMPLE_HEAD, title="load paths", title_justify="left")
    for name in ("engine", "rank", "load path", "parameters", "MiB"):
        ranks.add_column(name, justify="right")
    for worker, engine in report["engines"].items():
        for rank, load_paths in enumerate(engine["load_paths"]):
            for load_path, counts in sorted(load_paths.items()):
                size = f"{counts['bytes'] / 2**20:.2f}"
                ranks.add_row(worker, str(rank), load_path, str(counts["parameters"]), size)
    console.print(ranks)
    sent = ", ".join(f"rank {rank}: {size / 2**20:.2f} MiB" for rank, size in report["bytes_by_sender"].items())
    console.print(f"sent per transfer: {sent}", highlight=False)
    verified = sum(engine["equal"] for engine in report["engines"].values())
    console.print(f"all slices arrived unchanged; {verified} in-place slices verified in engine memory", style="green")
