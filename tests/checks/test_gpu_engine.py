"""How the section "engine" judges what its job wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.checks.jobs import judge_job, short_job
from megatron_webrl.checks.report import CheckResult
from megatron_webrl.config.load import parse_config
from megatron_webrl.launch.validation import check_settings
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.parameter_counts import config_sections, size_from_path

ROOT = Path(__file__).parents[2]
PENALTY = "trainer.reward={format_penalty: 0.1, length_penalty: 0.1, length_window: 40}"
TEACHER = 'trainer.distillation={coefficient: 1, url: "http://node7:8000", key_variable: KEY}'
OPTIONS = (
    TEACHER, PENALTY, "trainer.advantage={name: critic, scale: none, overlong: mask}", "trainer.loss.name=cispo",
    "trainer.merge_prefixes=trajectory", "trainer.warm_start={demonstrations: 9, demonstrations_file: made.records}",
)  # fmt: skip
NAME, CROSSED, GRAPHS = (
    "log-probabilities of engine and trainer", "updates during an episode, at most", "engines with CUDA graphs"
)  # fmt: skip
MEAN, SHARE = f"{NAME}: mean difference", f"{NAME}: share that differs by more than 0.1 nats"
GOOD = {"mean": 1e-5, "beyond": 0.0, "largest": 0.9}
EXTRA = {
    "updates_within_step_max": 0, "updates_across_steps_max": 1, "weights/failed_transfers": 0, "weights/engines": 2,
    "weights/engines_with_cuda_graphs": 2, "weights/in_place_parameters": 9, "weights/reloaded_parameters": 3,
    "weights/gib_per_second": 1.0, "weights/pause_seconds": 0.1,
}  # fmt: skip


def judged(
    folder: Path, overrides: list[str], gap: dict[str, float], changed: dict[str, int]
) -> dict[str, CheckResult]:
    config = short_job(parse_config(None, overrides), folder)
    config.run_folder.mkdir()
    (config.run_folder / "summary.json").write_text(json.dumps({"accounting": {"matches": True}}))
    mismatch = {f"logprob_mismatch/{figure}/lag_0": value for figure, value in gap.items()}
    update = {"tokens_per_second": 1.0, "extra": {**EXTRA, **changed, **mismatch}}
    (config.run_folder / "updates.jsonl").write_text(f"{json.dumps(update)}\n" * 3)
    return {each.name: each for each in judge_job(config)}


@pytest.mark.parametrize(
    ("platform", "dtype", "changed", "statuses"),
    [
        ("cuda", "float32", {}, {}),
        ("cuda", "float32", {"updates_across_steps_max": 0}, {CROSSED: "failed"}),
        ("cpu", "float32", {"updates_across_steps_max": 0}, {CROSSED: "skipped"}),
        ("cuda", "float32", {"weights/engines_with_cuda_graphs": 1}, {GRAPHS: "failed"}),
        ("cpu", "float32", {"weights/engines_with_cuda_graphs": 0}, {}),
        ("cuda", "float32", {"mean": 1e-3, "beyond": 0.01}, {MEAN: "failed", SHARE: "failed"}),
        ("cuda", "bfloat16", {"mean": 0.01, "beyond": 0.01}, {}),
        ("cuda", "bfloat16", {"mean": 0.05, "beyond": 0.01}, {MEAN: "failed"}),
        ("cuda", "bfloat16", {"mean": 0.01, "beyond": 0.2}, {SHARE: "failed"}),
    ],
)
def test_updates_graphs_and_differences_are_judged_and_the_largest_is_shown(
    tmp_path: Path, platform: str, dtype: str, changed: dict[str, Any], statuses: dict[str, str]
) -> None:
    gap = {name: changed.get(name, good) for name, good in GOOD.items()}
    others = {name: value for name, value in changed.items() if name not in GOOD}
    found = judged(tmp_path, [f"model.platform={platform}", f"model.dtype={dtype}"], gap, others)
    for name in (CROSSED, GRAPHS, MEAN, SHARE):
        assert found[name].status == statuses.get(name, "passed"), name
    assert (found[f"{NAME}: largest difference"].value, found[f"{NAME}: largest difference"].limit) == (0.9, None)


def test_an_fp8_cache_has_no_limit_and_a_job_without_compared_tokens_fails(tmp_path: Path) -> None:
    gap = {"mean": 0.5, "beyond": 0.5, "largest": 0.9}
    fp8 = judged(tmp_path, ["model.platform=cuda", "rollout.engine_options.kv_cache_dtype=fp8"], gap, {})
    assert {each.status for name, each in fp8.items() if name.startswith(NAME)} == {"passed"}
    (tmp_path / "none").mkdir()
    assert judged(tmp_path / "none", [], {}, {})[NAME].status == "failed"


@pytest.mark.parametrize("name", ["tiny_1gpu", "30b_a3b_32node"])
def test_the_short_job_is_valid_and_keeps_the_layout_but_not_the_algorithm(tmp_path: Path, name: str) -> None:
    config = parse_config(ROOT / "configs" / f"{name}.yaml", [*OPTIONS])
    size = size_from_path(config.model.path)
    description = config_sections(size) if size else read_model_config(ROOT / "models" / "quickstart")
    check_settings(config, description)
    check_settings(short := short_job(config, tmp_path), description)
    for setting in ("tensor_parallel", "expert_parallel", "data_parallel", "recompute", "tokens_per_microbatch"):
        assert getattr(short.trainer, setting) == getattr(config.trainer, setting)
    job = short.trainer
    assert (job.loss.name, job.distillation.coefficient, job.updates) == ("grpo", 0.0, 3)
    assert (job.checkpoint.every, job.checkpoint.last) == (0, False)
