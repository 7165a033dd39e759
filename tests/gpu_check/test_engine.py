"""How the section "engine" judges what its job wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.gpu_check.engine_section import judge_job, short_job
from megatron_webrl.launch.validation import check_config

ROOT = Path(__file__).parents[2]

EXTRA = {
    "updates_within_step_max": 0, "updates_across_steps_max": 1, "weights/failed_transfers": 0, "weights/engines": 2,
    "weights/engines_with_cuda_graphs": 2, "weights/in_place_parameters": 9, "weights/reloaded_parameters": 3,
    "weights/gib_per_second": 1.0, "weights/pause_seconds": 0.1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("platform", "changed", "statuses"),
    [
        ("cuda", {}, ("passed", "passed")),
        ("cuda", {"updates_across_steps_max": 0}, ("failed", "passed")),
        ("cpu", {"updates_across_steps_max": 0}, ("skipped", "passed")),
        ("cuda", {"weights/engines_with_cuda_graphs": 1}, ("passed", "failed")),
        ("cpu", {"weights/engines_with_cuda_graphs": 0}, ("passed", "passed")),
    ],
)
def test_an_update_must_meet_an_episode_and_engines_on_gpus_need_graphs(
    tmp_path: Path, platform: str, changed: dict[str, int], statuses: tuple[str, str]
) -> None:
    config = short_job(parse_config(None, [f"model.platform={platform}"]), tmp_path)
    config.run_folder.mkdir()
    (config.run_folder / "summary.json").write_text(json.dumps({"accounting": {"matches": True}}))
    update = {"logprob_mismatch_max": 1e-5, "tokens_per_second": 1.0, "extra": {**EXTRA, **changed}}
    (config.run_folder / "updates.jsonl").write_text(f"{json.dumps(update)}\n" * 3)
    found = {each.name: each.status for each in judge_job(config)}
    assert (found["updates during an episode, at most"], found["engines with CUDA graphs"]) == statuses


@pytest.mark.parametrize("name", ["quickstart", "tiny_1gpu"])
def test_the_short_job_of_a_configuration_is_valid(tmp_path: Path, name: str) -> None:
    own = ["trainer.profile.updates=[9]", "model.platform=cpu"]
    check_config(short_job(parse_config(ROOT / "configs" / f"{name}.yaml", own), tmp_path))


def test_the_short_job_of_a_configuration_with_penalties_and_an_overlong_filter_is_valid(tmp_path: Path) -> None:
    own = [
        "model.platform=cpu", "trainer.loss.name=grpo", "trainer.loss.raft_versions=0", "rollout.max_new_tokens=200",
        "trainer.reward={length_penalty: 0.1, length_window: 100}",
        "trainer.advantage={components: apart, discount: 0.9, anchor_weight: 1, overlong: mask}",
    ]  # fmt: skip
    config = parse_config(ROOT / "configs" / "quickstart.yaml", own)
    check_config(config)
    job = short_job(config, tmp_path)
    check_config(job)
    assert job.trainer.advantage.components == "apart"
    assert config.trainer.advantage.overlong == "mask"


def test_the_short_job_leaves_no_checkpoint(tmp_path: Path) -> None:
    checkpoint = short_job(parse_config(None), tmp_path).trainer.checkpoint
    assert (checkpoint.every, checkpoint.last) == (0, False)
