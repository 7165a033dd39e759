"""`webrl check weights`: send the weights of a configuration to its engines, and compare every slice."""

from __future__ import annotations

import json
from dataclasses import replace

from rich.console import Console

from megatron_webrl.checks.report import CheckResult, at_least, failed, measured
from megatron_webrl.config.schema import Config
from megatron_webrl.launch.local import run_here

SECTION, MIB = "weights", 2**20


def check_weights(config: Config, console: Console) -> list[CheckResult]:
    """Send weights without training, in a run "<run.name>-weights". Raises ConfigError."""
    config = weight_sync_config(config)
    if code := run_here(config, console, weights_only=True):
        return [failed(SECTION, "transfers", f"the run ended with code {code}; its logs are in {config.run_folder}")]
    content = json.loads((config.run_folder / "weights.json").read_text())
    results = []
    for number, metrics in enumerate(content["transfers"], 1):
        for name, key, unit in (
            ("time", "seconds", "s"), ("size", "weights/gib", "GiB"), ("speed", "weights/gib_per_second", "GiB/s"),
            ("longest pause", "weights/pause_seconds", "s"),
        ):  # fmt: skip
            results.append(measured(SECTION, f"{name} of transfer {number}", metrics[key], unit))
    for rank, size in content["bytes_by_sender"].items():
        results.append(measured(SECTION, f"sent per transfer by rank {rank}", size / MIB, "MiB"))
    for worker, engine in content["engines"].items():
        for rank, load_paths in enumerate(engine["load_paths"]):
            for load_path, counts in sorted(load_paths.items()):
                text = f"{counts['parameters']} parameters, {counts['bytes'] / MIB:.2f} MiB"
                results.append(measured(SECTION, f"{worker}, rank {rank}, {load_path}", text))
        name = f"{worker}, slices verified in engine memory"
        results.append(at_least(SECTION, name, engine["equal"], engine["equal"] + engine["different"]))
    return results


def weight_sync_config(config: Config) -> Config:
    """The configuration of the check: a run of its own that waits for all engines and has no checkpoints."""
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-weights", resume=False),
        rollout=replace(config.rollout, min_engines=config.rollout.engines),
        trainer=replace(config.trainer, checkpoint=replace(config.trainer.checkpoint, fallback_folder="")),
        weights=replace(config.weights, verify=True),
    )
