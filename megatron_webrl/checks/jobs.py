"""Checks by jobs: `webrl check weights`, and the section "job" of `webrl check gpu`.

The section runs a short whole job with the model, layout, engine and browsers of the configuration: a few updates with
checksums of every slice on both sides, while the engine serves episodes on pages of usual size. The trainer compares
the log-probabilities of the engine's tokens with its own, is killed, resumes from a checkpoint, and evaluates.

Without Slurm the section runs the job on this machine. On Slurm it writes the job's configuration,
launch/slurm/common.sh starts it as any other job, and `webrl check job` watches and judges it.
"""

from __future__ import annotations

import copy
import io
import json
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from megatron_webrl.checks.gpu import QUICK_LAYERS, write_layers
from megatron_webrl.checks.report import CheckResult, GpuCheckRequest, at_least, at_most, failed, measured, skipped
from megatron_webrl.config.judge import judge_config
from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config, EvaluationConfig, TrackingConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.config.trainer import CheckpointConfig, TrainerConfig
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.launch import run_folder
from megatron_webrl.launch.local import run_here
from megatron_webrl.launch.run_folder import RoleStartError
from megatron_webrl.launch.validation import check_config
from megatron_webrl.launch.watchdog import request_stack_dump
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.parameter_counts import count_parameters
from megatron_webrl.placement.prediction import StartEstimate
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.track import episodes, events
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint, version_and_copy
from megatron_webrl.track.summary import read_summary, read_updates
from megatron_webrl.types import failed_outcome

SECTION = "job"
UPDATES, QUICK_UPDATES = 5, 3
CHECKPOINT_EVERY = 2  # the first is complete before the second, after update 4, begins
WIDTH, HEIGHT = 1280, 768  # least size of a page, pixels
RESPONSE_TOKENS = 500
CONTEXT_TOKENS = 2560  # at least: such a page, what is said of it, and a response
ENVIRONMENTS = ("shop-find-price", "forum-count-replies", "wiki-look-up")
KILL_REASON = "the check wants to see a restart"
POLL_SECONDS = 0.5
END_SECONDS = 120.0  # for the first node to write the summary after the end of a job
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
    """Run the short job and judge it; write its configuration to request.job_file instead; or watch Slurm's."""
    if request.slurm_job:
        if request.config.run_folder.exists():  # else `webrl node prepare` has refused it
            watch_job(request.config, 0.95 * request.job_seconds)
        yield from judge_job(request.config)
        return
    job, output = short_job(request.config, request.quick), io.StringIO()
    try:
        run_folder.check_ended(job)
        if request.quick:
            sizes = (QUICK_LAYERS, job.trainer.pipeline_parallel * job.trainer.virtual_pipeline)
            shutil.rmtree(_random_model(job), ignore_errors=True)
            write_layers(job, _random_model(job), max(*sizes, job.rollout.pipeline_parallel))
            job.model.path, job.model.checkpoint = str(_random_model(job)), ""
        check_config(job)
        if not request.quick:
            yield (space := _space(job))
            if space.status == "failed":
                return
        if request.job_file:
            save_config(job, request.job_file)
            return
        run_folder.control_address_path(job).unlink(missing_ok=True)  # of an earlier check
        threading.Thread(target=watch_job, args=(job, 0.95 * request.job_seconds), daemon=True).start()
        run_here(job, Console(file=output, width=200))
    except ConfigError as error:
        yield failed(SECTION, "a whole job", f"{error}; give a CONFIG that can run here")
        return
    yield from judge_job(job)


def short_job(config: Config, quick: bool = False) -> Config:
    """The configuration with few, short episodes on pages of this machine and every transfer verified."""
    job, window = copy.deepcopy(config), max(config.rollout.max_model_len, CONTEXT_TOKENS)
    job.run.name, job.run.resume = f"{config.run.name}-check", False
    job.run.max_trainer_restarts = max(1, config.run.max_trainer_restarts)
    job.tracking = TrackingConfig(uri=f"sqlite:///{job.run_folder.absolute()}/mlflow.db")
    job.weights.verify = True
    job.judge, job.evaluation = judge_config(), EvaluationConfig(after=not quick, episodes=1)
    job.tasks = tasks_config("sites", environments=list(ENVIRONMENTS), max_steps=4)
    width, height = max(WIDTH, config.browser.width), max(HEIGHT, config.browser.height)
    job.browser = replace(config.browser, width=width, height=height, record="", replay="", replay_ignore=[])
    every, shards = 0 if quick else CHECKPOINT_EVERY, config.trainer.checkpoint.optimizer_shards
    job.trainer = TrainerConfig(
        **{name: getattr(config.trainer, name) for name in TRAINER_SETTINGS},
        updates=QUICK_UPDATES if quick else UPDATES,
        groups_per_update=max(2, config.trainer.data_parallel),
        zero_variance_groups="keep",
        checkpoint=CheckpointConfig(every=every, last=False, keep=1, optimizer_shards=shards),
    )
    job.trainer.tokens_per_microbatch = max(window, config.trainer.tokens_per_microbatch)
    # One group after the other, so that episodes are under way whenever an update arrives.
    job.rollout.group_size, job.rollout.groups_in_flight = 2, 1
    job.rollout.max_new_tokens, job.rollout.max_model_len = RESPONSE_TOKENS, window
    return job


def _random_model(job: Config) -> Path:
    """Where the model of a quick check is: beside the run's folder, which all nodes see."""
    return job.run_folder.with_name(f"{job.run.name}-model")


def _checkpoint_gib(job: Config) -> float:
    parameters = count_parameters(read_model_config(job.model.path)).total
    return StartEstimate.of_config(job, parameters).resumed_bytes / 2**30


def _space(job: Config) -> CheckResult:
    """The run's folder has room for two checkpoints: the newest one, and the one that is written."""
    folder, needed = Path(job.run.directory).absolute(), 2 * _checkpoint_gib(job)
    folder.mkdir(parents=True, exist_ok=True)
    note = f"{folder} must hold two checkpoints; set run.directory, or leave them out with --quick"
    free = shutil.disk_usage(folder).free / 2**30
    return at_least(SECTION, "free space for checkpoints", free, needed, "GiB", note if free < needed else "")


# -- a job that runs ----------------------------------------------------------------------------------------------


def watch_job(job: Config, seconds: float) -> None:
    """Have the last trainer rank killed once the job has a checkpoint and a later update; end the job after `seconds`.

    Returns once the first node has written the summary, or END_SECONDS after the end of the job.
    """
    deadline, kills, path = time.monotonic() + seconds, False, run_folder.control_address_path(job)
    # A job that never began, or has lost its control service, has a summary that says so.
    with suppress(JobFailed, RoleStartError):
        run_folder.wait_for_control_address(path, job.run.startup_timeout_seconds)
        control = ControlClient(path, "check")
        while control.job_end() is None:
            if time.monotonic() > deadline:
                control.end_job(failed_outcome(f"it did not finish within {seconds:.0f} s"))
            elif job.trainer.checkpoint.every and not kills and _is_past_checkpoint(job):
                kills = True
                request_stack_dump(job.run_folder, KILL_REASON, {_victim(job): None})
            time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + END_SECONDS
    while not _has_summary(job) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _has_summary(job: Config) -> bool:
    return any((each.role, each.event) == (events.JOB, events.ENDED) for each in events.read_events(job.run_folder))


def _victim(job: Config) -> str:
    return f"trainer-{job.trainer_world_size - 1}"


def _is_past_checkpoint(job: Config) -> bool:
    with suppress(OSError):  # the next look may succeed
        checkpoint, updates = find_latest_checkpoint(job.run_folder), read_updates(job.run_folder)
        saved = version_and_copy(checkpoint) if checkpoint else None
        return bool(saved and updates and updates[-1]["version"] > saved[0])
    return False


# -- a job that has ended -----------------------------------------------------------------------------------------


def judge_job(job: Config) -> Iterator[CheckResult]:
    """A result for each thing that the run's folder shows; then its checkpoints, and a random model, are removed."""
    try:
        summary = read_summary(job.run_folder)
        if summary["outcome"] == "finished":
            yield from _judge_updates(job, summary)
            if job.trainer.checkpoint.every:
                yield from _judge_restart(job, summary)
        else:
            yield failed(SECTION, "a whole job", f"{summary['outcome'][:300]} (logs: {job.run_folder}/logs)")
    except (OSError, ConfigError) as error:
        yield failed(SECTION, "a whole job", f"it did not start, or was killed; its output says why ({error})")
    for folder in (job.run_folder / "checkpoints", _random_model(job)):
        shutil.rmtree(folder, ignore_errors=True)


def _judge_updates(job: Config, summary: dict[str, Any]) -> Iterator[CheckResult]:
    """Of log-probabilities, the differences of the worst update under the same weights.

    The largest one is shown only: of thousands of tokens in bfloat16 one may differ by a quarter. So are all with an
    fp8 cache.
    """
    updates, cuda = summary["updates"], job.model.platform == "cuda"
    extra = [each["extra"] for each in updates]
    yield at_least(SECTION, "updates of a whole job", len(updates), job.trainer.updates)
    accounts = summary["accounting"]
    name, lost = "episodes that are accounted for", "" if accounts["matches"] else f"episodes were lost: {accounts}"
    yield failed(SECTION, name, lost) if lost else measured(SECTION, name, accounts["finished"])
    yield _judge_screenshot(job)
    yield measured(SECTION, "longest response", max(each["response_tokens_max"] for each in extra), "tokens")
    limits = (None, None) if job.rollout.has_fp8_cache else MISMATCH_LIMITS[job.model.dtype]
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
    failures = sum(each["weights/failed_transfers"] for each in extra)
    yield at_most(SECTION, "transfers that failed or whose checksums differed", failures, 0)
    name = "updates during an episode, at most"
    if job.rollout.mode == "async":
        crossed = max(each["updates_within_step_max"] + each["updates_across_steps_max"] for each in extra)
        yield at_least(SECTION, name, crossed, 1)
    else:
        yield skipped(SECTION, name, f"none with rollout.mode={job.rollout.mode}")
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


def _judge_screenshot(job: Config) -> CheckResult:
    """The size of the first screenshot that a worker stored."""
    name, wanted = "size of a screenshot", f"{job.browser.width} x {job.browser.height}"
    paths = sorted((job.run_folder / episodes.FOLDER).glob("*/*.records"))
    stored = (decode_trajectory(record) for path in paths for record in read_record_file(path))
    if (image := next((image for trajectory in stored for image in trajectory.images), None)) is None:
        return failed(SECTION, name, "no episode was stored")
    with Image.open(io.BytesIO(image)) as page:
        size = f"{page.width} x {page.height}"
    return CheckResult(SECTION, name, "passed" if size == wanted else "failed", size, wanted, "pixels")


def _judge_restart(job: Config, summary: dict[str, Any]) -> Iterator[CheckResult]:
    """A checkpoint, a killed rank, the training that continued from the checkpoint, and the evaluation at its end."""
    name, folder, victim = "checkpoint", find_latest_checkpoint(job.run_folder), _victim(job)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**30 if folder else 0.0
    yield at_least(SECTION, name, size, 0.9 * _checkpoint_gib(job), "GiB")
    kills = [each["reason"] for each in summary["restarts"] if each["role"] == victim and KILL_REASON in each["reason"]]
    note = "" if kills else "the job ended before"
    yield at_least(SECTION, f"restarts after {victim} was killed", len(kills), 1, note=note)
    after = summary["evaluation"]["after"]
    if after is None:
        yield failed(SECTION, "evaluation at the end", "it has no result")
        return
    yield at_least(SECTION, "starts from a checkpoint", after["restart_epoch"], 1)
    note = f"without a verdict: {after['no_verdict']}" if after["no_verdict"] else ""
    yield at_least(SECTION, "evaluated episodes with a verdict", after["episodes"], after["tasks_requested"], note=note)


# -- webrl check weights ------------------------------------------------------------------------------------------


def check_weights(config: Config, console: Console) -> list[CheckResult]:
    """Send weights without training, in a run "<run.name>-weights". Raises ConfigError."""
    config = weight_sync_config(config)
    if (code := run_here(config, console, weights_only=True)) == 130:  # interrupted
        raise KeyboardInterrupt
    if code:
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
