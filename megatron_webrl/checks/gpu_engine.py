"""Section "engine": a short whole job of the configuration, with its own model, engine, browsers and trainer.

A few updates with checksums of every slice on both sides; the engine serves episodes with screenshots while it is
updated, and the trainer compares the log-probabilities of the engine's tokens with its own.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from megatron_webrl.checks.gpu import GpuCheckRequest
from megatron_webrl.checks.report import CheckResult, at_least, at_most, failed, measured, skipped
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.judge import judge_config
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config, EvaluationConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.config.trainer import WarmStartConfig
from megatron_webrl.launch.local import run_here
from megatron_webrl.launch.validation import check_config

SECTION = "engine"
UPDATES = 3
MISMATCH_LIMITS = {"float32": (1e-4, 0.0), "bfloat16": (0.03, 0.05)}
"""By dtype, of the differences of log-probabilities under the same weights: mean in nats; share above 0.1 nats."""


def check(request: GpuCheckRequest) -> Iterator[CheckResult]:
    """Run the job in a temporary folder and read what it wrote."""
    with tempfile.TemporaryDirectory(prefix="webrl-check-gpu-") as folder:
        config = short_job(request.config, Path(folder))
        output = io.StringIO()
        try:
            check_config(config)
            code = run_here(config, Console(file=output, width=200))
        except ConfigError as error:
            yield failed(SECTION, "a whole job", f"{error}; give a CONFIG that can run here")
            return
        if not code:
            yield from judge_job(config)
            return
        summary = config.run_folder / "summary.json"
        reason = (output.getvalue().strip().splitlines() or ["it failed without a word"])[-1]
        if summary.is_file():
            reason = str(json.loads(summary.read_text())["outcome"])
        yield failed(SECTION, "a whole job", reason[:400])


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
    job.trainer.min_valid_episodes, job.trainer.profile_updates = 2, []
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
    updates = [json.loads(line) for line in (config.run_folder / "updates.jsonl").read_text().splitlines()]
    extra, cuda = [each["extra"] for each in updates], config.model.platform == "cuda"
    yield at_least(SECTION, "updates of a whole job", len(updates), UPDATES)
    if not summary["accounting"]["matches"]:
        yield failed(SECTION, "accounting", f"episodes were lost: {summary['accounting']}")
    yield from _judge_mismatch(config, extra)
    lost = sum(each["weights/failed_transfers"] for each in extra)
    yield at_most(SECTION, "transfers that failed or whose checksums differed", lost, 0)
    crossed = max(each["updates_within_step_max"] + each["updates_across_steps_max"] for each in extra)
    name = "updates during an episode, at most"
    if crossed or cuda:
        yield at_least(SECTION, name, crossed, 1)
    else:
        yield skipped(SECTION, name, "none: on these cores an update took longer than the episodes that went on")
    graphs, engines = extra[-1]["weights/engines_with_cuda_graphs"], extra[-1]["weights/engines"]
    yield at_least(SECTION, "engines with CUDA graphs", graphs, engines if cuda else 0)
    for name, key, unit in (
        ("engines with asynchronous scheduling", "weights/engines_with_async_scheduling", ""),
        ("parameters written in place", "weights/in_place_parameters", ""),
        ("parameters reloaded", "weights/reloaded_parameters", ""),
        ("weight transfer, verified", "weights/gib_per_second", "GiB/s"),
        ("pause of generation for an update", "weights/pause_seconds", "s"),
    ):
        yield measured(SECTION, name, extra[-1][key], unit)
    yield measured(SECTION, "trained tokens", max(each["tokens_per_second"] for each in updates), "tokens/s")


def _judge_mismatch(config: Config, extra: list[dict[str, float]]) -> Iterator[CheckResult]:
    """Differences of the engine's and the trainer's log-probabilities under the same weights, of the worst update.

    The largest one is shown only: of thousands of tokens in bfloat16 one may differ by a quarter. Neither is the mean
    judged with an fp8 cache.
    """
    name = "log-probabilities of engine and trainer"
    found = [
        [each[f"logprob_mismatch/{figure}/lag_0"] for figure in ("mean", "beyond", "largest")]
        for each in extra
        if "logprob_mismatch/mean/lag_0" in each
    ]
    if not found:
        yield failed(SECTION, name, "no token was scored by both under equal weights")
        return
    mean, beyond, largest = map(max, zip(*found, strict=True))
    limits = MISMATCH_LIMITS[config.model.dtype]
    if config.rollout.kv_cache_dtype == "fp8":
        yield measured(SECTION, f"{name}: mean difference with an fp8 KV cache", mean, "nats")
    else:
        yield at_most(SECTION, f"{name}: mean difference", mean, limits[0], "nats")
        yield at_most(SECTION, f"{name}: share that differs by more than 0.1 nats", beyond, limits[1])
    yield measured(SECTION, f"{name}: largest difference", largest, "nats")
