"""Section "engine": a short whole job of the configuration, with its own model, engine, browsers and trainer.

A few updates with checksums of every slice on both sides; the engine serves episodes with screenshots while it is
updated, and the trainer compares the log-probabilities of the engine's tokens with its own.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_webrl.checks.gpu.request import GpuCheckRequest
from megatron_webrl.checks.gpu.results import CheckResult, at_least, at_most, failed, measured, skipped
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.judge import judge_config
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config, EvaluationConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.config.trainer import ProfileConfig, WarmStartConfig
from megatron_webrl.launch.local import run_here
from megatron_webrl.launch.validation import check_config

SECTION = "engine"
UPDATES = 3
GAP, FP8_GAP = "log-probability gap to the trainer", "log-probability gap with an fp8 KV cache"
NO_GAP = "no token was scored by both under equal weights"
LOGPROB_GAP = {"float32": 1e-3, "bfloat16": 0.25}  # as in `webrl parity`: bfloat16 near 16 are 0.06 to 0.125 apart


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Run the job in a temporary folder and read what it wrote; the same with an fp8 KV cache."""
    with tempfile.TemporaryDirectory(prefix="webrl-gpu-check-") as folder:
        config = short_job(request.config, Path(folder))
        try:
            failure = _run(config)
        except ConfigError as error:
            failure = f"{error}; give a CONFIG that can run here"
        if failure:
            yield failed(SECTION, "a whole job", failure)
            return
        yield from judge_job(config)
        if config.rollout.kv_cache_dtype == "auto":
            yield _gap_with_fp8_cache(config)


def _run(config: Config) -> str:
    """Run a job; returns why it failed, empty if it did not. Raises ConfigError if it cannot start."""
    check_config(config)
    output = io.StringIO()
    code = run_here(config, Console(file=output, width=200))
    return _last_line(config, output.getvalue()) if code else ""


def _gap_with_fp8_cache(config: Config) -> CheckResult:
    """The gap of the same job with rollout.kv_cache_dtype=fp8, which has no limit."""
    if config.model.platform != "cuda" or config.engine_dtype != "bfloat16":
        return skipped(SECTION, FP8_GAP, "needs a GPU and a CONFIG in bfloat16")
    job = copy.deepcopy(config)
    job.run.name, job.rollout.kv_cache_dtype = f"{config.run.name}-fp8", "fp8"
    if failure := _run(job):
        return failed(SECTION, FP8_GAP, failure)
    gaps = _logprob_gaps(_updates(job))
    return measured(SECTION, FP8_GAP, max(gaps), "nats") if gaps else failed(SECTION, FP8_GAP, NO_GAP)


def _updates(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (config.run_folder / "updates.jsonl").read_text().splitlines()]


def _logprob_gaps(updates: Sequence[Mapping[str, Any]]) -> list[float]:
    """The largest difference, in nats, between log-probabilities of engine and trainer, of each update that has one."""
    return [each["logprob_mismatch_max"] for each in updates if each["logprob_mismatch_max"] is not None]


def short_job(config: Config, folder: Path) -> Config:
    """The configuration with few, short episodes on pages of this machine and every transfer verified."""
    job = copy.deepcopy(config)
    job.run.name, job.run.directory, job.run.resume = "gpu-check", str(folder), False
    job.tracking.uri = f"sqlite:///{folder}/mlflow.db"
    job.weights.verify = True
    job.evaluation = EvaluationConfig()
    job.trainer.checkpoint.every = 0
    job.trainer.checkpoint.last = False  # of 8B it would take more than 100 GiB of the temporary folder
    job.trainer.updates, job.trainer.groups_per_update = UPDATES, max(2, job.trainer.data_parallel)
    job.trainer.minibatches = job.trainer.epochs = 1
    job.trainer.zero_variance_groups = "keep"  # a model without training may never succeed,
    if job.trainer.loss.imitates_successes:  # and so would give nothing to imitate
        job.trainer.loss = loss_config()
    job.trainer.distillation = DistillationConfig()  # the teacher may not run yet
    job.trainer.advantage.overlong = "keep"  # without a success there might be nothing to train
    job.trainer.min_valid_episodes, job.trainer.profile = 2, ProfileConfig()
    job.trainer.warm_start = WarmStartConfig()
    if job.trainer.critic:
        job.trainer.critic.warmup_updates = 0  # during a warm-up the engine's weights would not change
    # One group after the other, so that episodes are under way whenever an update arrives.
    job.rollout.group_size, job.rollout.groups_in_flight = 2, 1
    job.rollout.max_new_tokens = min(job.rollout.max_new_tokens, 64)
    if job.trainer.reward.length_penalty:
        job.trainer.reward.length_window = min(job.trainer.reward.length_window, job.rollout.max_new_tokens)
    job.judge = judge_config()
    job.tasks = tasks_config(environments=["click-test", "focus-text"], max_steps=6)
    return job


def judge_job(config: Config) -> Iterator[CheckResult]:
    """A result for each thing that the run folder of the job shows."""
    summary = json.loads((config.run_folder / "summary.json").read_text())
    updates = _updates(config)
    yield at_least(SECTION, "updates of a whole job", len(updates), UPDATES)
    if not summary["accounting"]["matches"]:
        yield failed(SECTION, "accounting", f"episodes were lost: {summary['accounting']}")
    if not (gaps := _logprob_gaps(updates)):
        yield failed(SECTION, GAP, NO_GAP)
    elif config.rollout.kv_cache_dtype == "fp8":
        yield measured(SECTION, FP8_GAP, max(gaps), "nats")
    else:
        yield at_most(SECTION, GAP, max(gaps), LOGPROB_GAP[config.model.dtype])
    extra = [each["extra"] for each in updates]
    lost = sum(each["weights/failed_transfers"] for each in extra)
    yield at_most(SECTION, "transfers that failed or whose checksums differed", lost, 0)
    crossed = max(each["updates_within_step_max"] + each["updates_across_steps_max"] for each in extra)
    name = "updates during an episode, at most"
    if crossed or config.model.platform == "cuda":
        yield at_least(SECTION, name, crossed, 1)
    else:
        yield skipped(SECTION, name, "none: on these cores an update took longer than the episodes that went on")
    graphs, engines = extra[-1]["weights/engines_with_cuda_graphs"], extra[-1]["weights/engines"]
    yield at_least(SECTION, "engines with CUDA graphs", graphs, engines if config.model.platform == "cuda" else 0)
    for name, key, unit in (
        ("engines with asynchronous scheduling", "weights/engines_with_async_scheduling", ""),
        ("parameters written in place", "weights/in_place_parameters", ""),
        ("parameters reloaded", "weights/reloaded_parameters", ""),
        ("weight transfer, verified", "weights/gib_per_second", "GiB/s"),
        ("pause of generation for an update", "weights/pause_seconds", "s"),
    ):
        yield measured(SECTION, name, extra[-1][key], unit)
    yield measured(SECTION, "trained tokens", max(each["tokens_per_second"] for each in updates), "tokens/s")


def _last_line(config: Config, output: str) -> str:
    summary = config.run_folder / "summary.json"
    if summary.is_file():
        return str(json.loads(summary.read_text())["outcome"])[:400]
    return (output.strip().splitlines() or ["it failed without a word"])[-1][:400]
