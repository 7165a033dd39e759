"""Checks by jobs: `webrl check weights`, and the section "engine" of `webrl check gpu`.

The section runs a short whole job with the model, layout, engine and browsers of the configuration. A few updates with
checksums of every slice on both sides; the engine serves episodes with screenshots while it is updated, and the trainer
compares the log-probabilities of the engine's tokens with its own.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_webrl.checks.report import CheckResult, GpuCheckRequest, at_least, at_most, failed, measured, skipped
from megatron_webrl.config.judge import judge_config
from megatron_webrl.config.schema import Config, EvaluationConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.config.trainer import CheckpointConfig, TrainerConfig
from megatron_webrl.launch.local import run_here
from megatron_webrl.launch.validation import check_config
from megatron_webrl.track.summary import read_summary

SECTION = "engine"
UPDATES = 3
MISMATCH = "log-probabilities of engine and trainer"
MISMATCH_LIMITS = {"float32": (1e-4, 0.0), "bfloat16": (0.03, 0.05)}
"""By dtype, of the differences of log-probabilities under the same weights: mean in nats; share above 0.1 nats."""
TRAINER_SETTINGS = (
    "tensor_parallel", "pipeline_parallel", "virtual_pipeline", "expert_parallel", "expert_tensor_parallel",
    "context_parallel", "data_parallel", "recompute", "layers", "attention", "routing_replay",
    "tokens_per_microbatch", "merge_prefixes", "train_vision", "optimizer",
)  # fmt: skip
"""Kept of the configuration; its algorithm is not: a model without training may never succeed."""


def check_job(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Run the job in a temporary folder and read what it wrote."""
    with tempfile.TemporaryDirectory(prefix="webrl-check-gpu-") as folder:
        config, output = short_job(request.config, Path(folder)), io.StringIO()
        try:
            check_config(config)
            code = run_here(config, Console(file=output, width=200))
        except ConfigError as error:
            yield failed(SECTION, "a whole job", f"{error}; give a CONFIG that can run here")
            return
        if not code:
            yield from judge_job(config)
            return
        summary, lines = config.run_folder / "summary.json", output.getvalue().strip().splitlines() or ["no output"]
        reason = json.loads(summary.read_text())["outcome"] if summary.is_file() else lines[-1]
        yield failed(SECTION, "a whole job", str(reason)[:400])


def short_job(config: Config, folder: Path) -> Config:
    """The configuration with few, short episodes on pages of this machine and every transfer verified."""
    job = copy.deepcopy(config)
    job.run.name, job.run.directory, job.run.resume = "gpu-check", str(folder), False
    job.tracking.uri = f"sqlite:///{folder}/mlflow.db"
    job.weights.verify = True
    job.judge, job.evaluation = judge_config(), EvaluationConfig()
    job.tasks = tasks_config(environments=["click-test", "focus-text"], max_steps=6)
    job.trainer = TrainerConfig(
        **{name: getattr(config.trainer, name) for name in TRAINER_SETTINGS},
        updates=UPDATES,
        groups_per_update=max(2, config.trainer.data_parallel),
        zero_variance_groups="keep",
        checkpoint=CheckpointConfig(last=False),  # of 8B it would take more than 100 GiB of the temporary folder
    )
    # One group after the other, so that episodes are under way whenever an update arrives.
    job.rollout.group_size, job.rollout.groups_in_flight = 2, 1
    job.rollout.max_new_tokens = min(job.rollout.max_new_tokens, 64)
    return job


def judge_job(config: Config) -> Iterator[CheckResult]:
    """A result for each thing that the run folder of the job shows.

    Differences of log-probabilities are those of the worst update, under the same weights. The largest one is shown
    only: of thousands of tokens in bfloat16 one may differ by a quarter. So are all with an fp8 cache.
    """
    summary = read_summary(config.run_folder)
    updates = [json.loads(line) for line in (config.run_folder / "updates.jsonl").read_text().splitlines()]
    extra, cuda = [each["extra"] for each in updates], config.model.platform == "cuda"
    yield at_least(SECTION, "updates of a whole job", len(updates), UPDATES)
    if not summary["accounting"]["matches"]:
        yield failed(SECTION, "accounting", f"episodes were lost: {summary['accounting']}")
    limits = (None, None) if config.rollout.has_fp8_cache else MISMATCH_LIMITS[config.model.dtype]
    compared = [each for each in extra if "logprob_mismatch/mean/lag_0" in each]
    if not compared:
        yield failed(SECTION, MISMATCH, "no token was scored by both under equal weights")
    else:
        for name, figure, limit in (
            ("mean difference", "mean", limits[0]),
            ("share that differs by more than 0.1 nats", "beyond", limits[1]),
            ("largest difference", "largest", None),
        ):
            worst = max(each[f"logprob_mismatch/{figure}/lag_0"] for each in compared)
            label = f"{MISMATCH}: {name}"
            yield measured(SECTION, label, worst) if limit is None else at_most(SECTION, label, worst, limit)
    lost = sum(each["weights/failed_transfers"] for each in extra)
    yield at_most(SECTION, "transfers that failed or whose checksums differed", lost, 0)
    name = "updates during an episode, at most"
    crossed = max(each["updates_within_step_max"] + each["updates_across_steps_max"] for each in extra)
    if crossed or cuda:
        yield at_least(SECTION, name, crossed, 1)
    else:
        yield skipped(SECTION, name, "none: on these cores an update took longer than the episodes that went on")
    graphs, engines = extra[-1]["weights/engines_with_cuda_graphs"], extra[-1]["weights/engines"]
    yield at_least(SECTION, "engines with CUDA graphs", graphs, engines if cuda else 0)
    for name, key, unit in (
        ("parameters written in place", "weights/in_place_parameters", ""),
        ("parameters reloaded", "weights/reloaded_parameters", ""),
        ("weight transfer, verified", "weights/gib_per_second", "GiB/s"),
        ("pause of generation for an update", "weights/pause_seconds", "s"),
    ):
        yield measured(SECTION, name, extra[-1][key], unit)
    yield measured(SECTION, "trained tokens", max(each["tokens_per_second"] for each in updates), "tokens/s")


# -- webrl check weights ------------------------------------------------------------------------------------------


def check_weights(config: Config, console: Console) -> list[CheckResult]:
    """Send weights without training, in a run "<run.name>-weights". Raises ConfigError."""
    config = weight_sync_config(config)
    if code := run_here(config, console, weights_only=True):
        return [failed("weights", "transfers", f"the run ended with code {code}; its logs are in {config.run_folder}")]
    content = json.loads((config.run_folder / "weights.json").read_text())
    results = []
    for number, metrics in enumerate(content["transfers"], 1):
        for name, key, unit in (
            ("time", "seconds", "s"), ("size", "weights/gib", "GiB"), ("speed", "weights/gib_per_second", "GiB/s"),
            ("longest pause", "weights/pause_seconds", "s"),
        ):  # fmt: skip
            results.append(measured("weights", f"{name} of transfer {number}", metrics[key], unit))
    for rank, size in content["bytes_by_sender"].items():
        results.append(measured("weights", f"sent per transfer by rank {rank}", size / 2**20, "MiB"))
    for worker, engine in content["engines"].items():
        for rank, load_paths in enumerate(engine["load_paths"]):
            for load_path, counts in sorted(load_paths.items()):
                text = f"{counts['parameters']} parameters, {counts['bytes'] / 2**20:.2f} MiB"
                results.append(measured("weights", f"{worker}, rank {rank}, {load_path}", text))
        name = f"{worker}, slices verified in engine memory"
        results.append(at_least("weights", name, engine["equal"], engine["equal"] + engine["different"]))
    return results


def weight_sync_config(config: Config) -> Config:
    """The configuration of the check: a run of its own that waits for all engines and has no checkpoints."""
    return replace(
        config,
        run=replace(config.run, name=f"{config.run.name}-weights", resume=False),
        rollout=replace(config.rollout, min_engines=config.rollout.engines),
        weights=replace(config.weights, verify=True),
    )
