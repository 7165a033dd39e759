"""The section "job" of `webrl check gpu`: its configuration, whom it kills and when, how it judges what a job wrote."""

from __future__ import annotations

import io
import json
import shutil
import threading
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_webrl.checks import jobs
from megatron_webrl.checks.gpu import describe_pass
from megatron_webrl.checks.jobs import KILL_REASON, check_job, judge_job, short_job, watch_job
from megatron_webrl.checks.report import CheckResult, GpuCheckRequest, measured, skipped
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.launch.validation import check_settings
from megatron_webrl.launch.watchdog import latest_request
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.parameter_counts import config_sections, size_from_path
from megatron_webrl.track import events
from megatron_webrl.track.episodes import FOLDER, EpisodeStore
from megatron_webrl.track.events import EventLog
from tests.job_control import connect, control_service
from tests.trajectories import trajectory
from tests.waiting import until

ROOT = Path(__file__).parents[2]
MODEL = f"model.path={ROOT / 'models' / 'quickstart'}"
PENALTY = "trainer.reward={format_penalty: 0.1, length_penalty: 0.1, length_window: 40}"
TEACHER = 'trainer.distillation={coefficient: 1, url: "http://node7:8000", key_variable: KEY}'
OPTIONS = (
    TEACHER, PENALTY, "trainer.advantage={name: critic, scale: none, overlong: mask}", "trainer.loss.name=cispo",
    "trainer.merge_prefixes=trajectory", "trainer.warm_start={demonstrations: 9, demonstrations_file: made.records}",
)  # fmt: skip
NAME, CROSSED, GRAPHS, KILLED, RESUMED, EVALUATED, SCREENSHOT = (
    "log-probabilities of engine and trainer", "updates during an episode, at most", "engines with CUDA graphs",
    "restarts after trainer-0 was killed", "starts from a checkpoint", "evaluated episodes with a verdict",
    "size of a screenshot",
)  # fmt: skip
MEAN, SHARE = f"{NAME}: mean difference", f"{NAME}: share that differs by more than 0.1 nats"
MISMATCH = {"mean": 1e-5, "beyond": 0.0, "largest": 0.9}
EXTRA = {
    "updates_within_step_max": 0, "updates_across_steps_max": 1, "weights/failed_transfers": 0, "weights/engines": 2,
    "weights/engines_with_cuda_graphs": 2, "weights/in_place_parameters": 9, "weights/reloaded_parameters": 3,
    "weights/gib_per_second": 1.0, "weights/pause_seconds": 0.1, "response_tokens_max": 500,
}  # fmt: skip
MISMATCHES = {f"logprob_mismatch/{figure}/lag_0": value for figure, value in MISMATCH.items()}
UPDATE = {"tokens_per_second": 1.0, "extra": {**EXTRA, **MISMATCHES}}
SUMMARY = {
    "outcome": "finished",
    "accounting": {"matches": True, "finished": 20},
    "restarts": [{"role": "trainer-0", "reason": f"trainer-0 killed by SIGKILL; last log line: {KILL_REASON}"}],
    "evaluation": {"after": {"restart_epoch": 1, "episodes": 3, "tasks_requested": 3, "no_verdict": {}}},
}


def tiny(folder: Path) -> Config:
    """The configuration that the command takes by default."""
    return parse_config(ROOT / "configs/tiny_1gpu.yaml", [MODEL, "model.platform=cpu", f"run.directory={folder}"])


def judged(
    folder: Path, overrides: tuple[str, ...] = (), extra: dict[str, float] | None = None, *, quick: bool = False,
    checkpoint_bytes: int = 40 * 2**20, size: tuple[int, int] = (1280, 768), **summary: Any,
) -> dict[str, CheckResult]:  # fmt: skip
    """The lines of a job that wrote a screenshot of `size`, and in which what is not given went well."""
    job = short_job(parse_config(None, [MODEL, f"run.directory={folder}", *overrides]), quick)
    checkpoint = job.run_folder / "checkpoints" / "version-000004"
    checkpoint.mkdir(parents=True)
    with (checkpoint / "shard").open("wb") as file:
        file.truncate(checkpoint_bytes)
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    page = io.BytesIO()
    Image.new("RGB", size).save(page, "PNG")
    store = EpisodeStore(job.run_folder / FOLDER / "rollout-0", 2**30)
    store.add([replace(trajectory(), images=(page.getvalue(),))])
    store.close()
    update = {**UPDATE, "extra": {**EXTRA, **MISMATCHES, **(extra or {})}}
    content = {**SUMMARY, "updates": [update] * job.trainer.updates, **summary}
    (job.run_folder / "summary.json").write_text(json.dumps(content))
    found = {each.name: each for each in judge_job(job)}
    assert not checkpoint.exists()  # of 8B it has more than 100 GiB
    return found


@pytest.mark.parametrize(
    ("dtype", "changed", "failed"),
    [
        ("float32", {}, ()),
        ("float32", {"updates_across_steps_max": 0}, (CROSSED,)),
        ("float32", {"weights/engines_with_cuda_graphs": 1}, (GRAPHS,)),
        ("float32", {"mean": 1e-3, "beyond": 0.01}, (MEAN, SHARE)),
        ("bfloat16", {"mean": 0.01, "beyond": 0.01}, ()),
        ("bfloat16", {"mean": 0.05, "beyond": 0.01}, (MEAN,)),
        ("bfloat16", {"mean": 0.01, "beyond": 0.2}, (SHARE,)),
    ],
)
def test_updates_graphs_and_differences_are_judged_and_the_largest_is_shown(
    tmp_path: Path, dtype: str, changed: dict[str, float], failed: tuple[str, ...]
) -> None:
    extra = {f"logprob_mismatch/{name}/lag_0" if name in MISMATCH else name: value for name, value in changed.items()}
    found = judged(tmp_path, ("model.platform=cuda", f"model.dtype={dtype}"), extra, checkpoint_bytes=2**30)
    assert [name for name, each in found.items() if each.status != "passed"] == list(failed)
    assert (found[f"{NAME}: largest difference"].value, found[f"{NAME}: largest difference"].limit) == (0.9, None)


@pytest.mark.parametrize(
    ("changed", "failed", "says"),
    [
        ({"restarts": []}, KILLED, "the job ended before"),
        ({"restarts": [{"role": "trainer-0", "reason": "trainer-0 exited with 1"}]}, KILLED, "the job ended before"),
        ({"evaluation": {"after": None}}, "evaluation at the end", "it has no result"),
        ({"checkpoint_bytes": 2**20}, "checkpoint", ""),
        ({"size": (1280, 720)}, SCREENSHOT, ""),
        ({"accounting": {"matches": False}}, "episodes that are accounted for", "episodes were lost"),
        ({"updates": [UPDATE]}, "updates of a whole job", ""),
        ({"updates": [{**UPDATE, "extra": EXTRA}] * 5}, NAME, "no token was scored by both"),
        ({"outcome": "failed: no engine came"}, "a whole job", "failed: no engine came (logs: "),
    ],
)
def test_each_part_of_the_job_that_is_missing_fails_by_name(
    tmp_path: Path, changed: dict[str, Any], failed: str, says: str
) -> None:
    found = judged(tmp_path, **changed)
    assert [name for name, each in found.items() if each.status == "failed"] == [failed]
    assert says in found[failed].note


def test_a_restart_without_a_checkpoint_and_an_evaluation_without_verdicts_fail(tmp_path: Path) -> None:
    after = {"restart_epoch": 0, "episodes": 1, "tasks_requested": 3, "no_verdict": {"crash": 2}}
    found = judged(tmp_path, evaluation={"after": after})
    assert (found[RESUMED].status, found[EVALUATED].status) == ("failed", "failed")
    assert "crash" in found[EVALUATED].note


def test_an_fp8_cache_has_no_limit_and_no_episode_continues_over_an_update_of_a_synchronous_job(tmp_path: Path) -> None:
    extra = {"logprob_mismatch/mean/lag_0": 0.5, "logprob_mismatch/beyond/lag_0": 0.5, "updates_across_steps_max": 0}
    options = ("rollout.engine_options.kv_cache_dtype=fp8", "rollout.mode=sync")
    found = judged(tmp_path, options, extra)
    assert {each.status for name, each in found.items() if name.startswith(NAME)} == {"passed"}
    assert (found[CROSSED].status, found[CROSSED].note) == ("skipped", "none with rollout.mode=sync")


def test_a_job_that_left_nothing_fails(tmp_path: Path) -> None:
    [line] = judge_job(short_job(parse_config(None, [f"run.directory={tmp_path}"])))
    assert (line.name, line.status) == ("a whole job", "failed")
    assert "it did not start, or was killed" in line.note


@pytest.mark.parametrize("name", ["tiny_1gpu", "30b_a3b_32node", "8b_1node"])
def test_the_short_job_is_valid_and_keeps_the_layout_but_not_the_algorithm(tmp_path: Path, name: str) -> None:
    options = [*OPTIONS, f"run.directory={tmp_path}"]
    config = parse_config(ROOT / "configs" / f"{name}.yaml", options)
    size = size_from_path(config.model.path)
    description = config_sections(size) if size else read_model_config(ROOT / "models" / "quickstart")
    check_settings(config, description)
    check_settings(short := short_job(config), description)
    for setting in ("tensor_parallel", "expert_parallel", "data_parallel", "recompute"):
        assert getattr(short.trainer, setting) == getattr(config.trainer, setting)
    assert short.cluster == config.cluster
    job = short.trainer
    assert (job.loss.name, job.distillation.coefficient, job.updates) == ("grpo", 0.0, 5)
    assert (job.checkpoint.every, job.checkpoint.keep, job.checkpoint.last, short.evaluation.after) == (
        2,
        1,
        False,
        True,
    )
    assert (short.browser.width, short.browser.height, short.rollout.max_new_tokens) == (1280, 768, 500)
    assert short.run_folder == tmp_path / f"{name}-check"
    quick = short_job(config, quick=True)
    assert (quick.trainer.checkpoint.every, quick.evaluation.after, quick.trainer.updates) == (0, False, 3)


def test_a_rank_is_killed_once_an_update_follows_a_checkpoint_and_the_job_ends_at_its_limit(tmp_path: Path) -> None:
    job = short_job(parse_config(None, [f"run.directory={tmp_path}", "trainer.data_parallel=2"]))
    (job.run_folder / "checkpoints").mkdir(parents=True)
    updates = job.run_folder / "updates.jsonl"
    updates.write_text('{"version": 1}\n{"version": 2}\n')
    assert not jobs._is_past_checkpoint(job)
    (job.run_folder / "checkpoints" / "latest").write_text("version-000002")
    assert not jobs._is_past_checkpoint(job)  # a restart would lose nothing
    with control_service(job.run_folder) as address, updates.open("a") as file:
        watcher = threading.Thread(target=watch_job, args=(job, 60.0))
        watcher.start()
        file.write('{"version": 3}\n')
        file.flush()
        until(lambda: latest_request(job.run_folder), "the kill")
        control = connect(address, "test")
        control.end_job("finished")
        EventLog(job.run_folder).add(events.JOB, events.ENDED, "finished")
        watcher.join(10)
        assert not watcher.is_alive()
        request = latest_request(job.run_folder)
    assert request is not None
    assert (request.reason, request.targets) == (KILL_REASON, {"trainer-1": None})
    with control_service(job.run_folder) as address:
        watch_job(job, 0.0)
        end = connect(address, "test").job_end()
    assert end is not None
    assert end["outcome"] == "failed: it did not finish within 0 s"


def test_a_disk_without_room_for_two_checkpoints_is_named_before_a_job_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path)
    request = GpuCheckRequest(config, "cpu", ("job",), job_file=tmp_path / "job.yaml")
    [space] = check_job(request)
    assert (space.status, parse_config(request.job_file)) == ("passed", short_job(config))
    assert 0.04 < space.limit < 0.06  # two checkpoints of 2 million parameters: weights and two moments in float32
    (tmp_path / "job.yaml").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "free")(2**20))
    [space] = check_job(request)
    assert (space.status, (tmp_path / "job.yaml").exists()) == ("failed", False)
    assert f"{tmp_path} must hold two checkpoints" in space.note


@pytest.mark.slow
def test_a_quick_job_has_two_random_layers_and_no_checkpoint(tmp_path: Path) -> None:
    request = GpuCheckRequest(tiny(tmp_path), "cpu", ("job",), quick=True, job_file=tmp_path / "job.yaml")
    assert list(check_job(request)) == []
    job = parse_config(tmp_path / "job.yaml")
    model = Path(job.model.path)
    assert (model.parent, job.trainer.checkpoint.every) == (tmp_path, 0)
    assert read_model_config(model)["text_config"]["num_hidden_layers"] == 2
    list(judge_job(job))
    assert not model.exists()


def test_the_last_line_says_what_a_pass_means_and_what_it_does_not_mean() -> None:
    request = GpuCheckRequest(parse_config(None), "cuda", ("environment", "nodes", "model", "links", "job"))
    results = [measured(section, "all", 1) for section in request.sections]
    whole, quick = describe_pass(request, results), describe_pass(replace(request, quick=True), results)
    assert "four random layers" in whole
    assert "survives a killed rank" in whole.partition("It does not mean")[0]
    assert "learns" in whole.partition("It does not mean")[2]
    assert "two random layers" in quick
    assert "killed rank" not in quick
    assert "the whole model fits" in quick.partition("It does not mean")[2]
    ran = [measured("model", "all", 1), skipped("nodes", "all", "no report")]
    part = describe_pass(replace(request, platform="cpu", sections=("nodes", "model")), ran)
    assert "nodes reach" not in part
    assert "anything of GPUs" in part.partition("It does not mean")[2]
    assert "(environment, nodes, links, job)" in part
