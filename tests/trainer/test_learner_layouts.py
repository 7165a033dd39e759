"""The learner makes the same updates in every layout, and resumes in each: metrics and weights, equal on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.checkpoint.checkpoint_files import latest_checkpoint
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
from megatron_webrl.trainer.main import make_sequence_packer
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from megatron_webrl.trainer.reference import make_reference
from megatron_webrl.types import Group, Trajectory
from tests.metrics_page import undocumented
from tests.trainer.ranks import (
    VERSION,
    largest_difference,
    make_config,
    make_groups,
    make_learner,
    process_groups,
    results,
    save,
    update,
    weights_of,
)
from tools.make_tiny_model import make_tiny_model

Cases = dict[tuple[str, str], dict[str, dict[str, int]]]  # model, kind of loss -> layouts
DP2, TP2, CP2, PP2 = {"data_parallel": 2}, {"tensor_parallel": 2}, {"context_parallel": 2}, {"pipeline_parallel": 2}
VPP2, EP2, ETP2 = PP2 | {"virtual_pipeline": 2}, {"expert_parallel": 2}, {"expert_tensor_parallel": 2}
DP4 = {"data_parallel": 4}
# Number of ranks and cases. `critic`: resumed from a checkpoint of the first layout. `grpo`: with a teacher. `gspo`:
# with a reference policy, ratios and masks per response. All layouts of a case must agree with each other.
FIRST: dict[str, tuple[int, Cases]] = {
    "each": (2, {("dense", "critic"): {"tp2": TP2, "dp2": DP2, "cp2": CP2, "pp2 vpp2": VPP2}}),
    "several": (4, {("dense", "gspo"): {"dp4": DP4, "cp2 pp2": CP2 | PP2}}),
    "several with experts": (4, {("sparse", "grpo"): {"dp4": DP4, "ep2 tp2 pp2": TP2 | EP2 | PP2}}),
}
REST: tuple[int, Cases] = (
    2,
    {
        ("qwen3_5", "critic"): {"tp2": TP2, "dp2": DP2, "pp2": PP2},
        ("sparse", "gspo"): {"dp2": DP2, "cp2 ep2": CP2 | EP2, "ep2": DP2 | EP2, "tp2 etp2": TP2 | ETP2},
    },
)
LOSSES = {
    "critic": loss_config(clip_low=1e-3, clip_high=1e-3),
    "grpo": loss_config(clip_low=1e-3, clip_high=1e-3),
    "gspo": loss_config(
        "gspo", clip_low=1e-3, clip_high=1e-3, importance_weight_cap=1e9, kl_rejection_bound=1.2, max_token_lag=1,
        kl_coefficient=0.1, entropy_coefficient=0.1,
    ),
}  # fmt: skip
AHEAD = ("cp2", "pp2 vpp2")
"""Layouts with image workers; in the others the ranks process images themselves."""


def train(platform: Any, folder: Path, models: dict[str, str], cases: Cases) -> dict[Any, Any]:
    found = {}
    for (model, kind), layouts in cases.items():
        for name, sizes in layouts.items():
            config = make_config(models[model], folder, epochs=1, image_workers=int(name in AHEAD), **sizes)
            config.trainer.loss = LOSSES[kind]
            if kind == "critic":
                config.trainer.advantage = advantage_config("critic", discount=0.5)
            config.trainer.distillation.coefficient = 0.5 * (kind == "grpo")
            with process_groups(config):
                found[model, kind, name] = _train(config, platform, folder / model, kind)
    return found


def _train(config: Config, platform: Any, run: Path, kind: str) -> dict[str, Any]:
    """An update; with a critic another one, after a resume from the checkpoint of the first layout."""
    groups = [_varied(group) for group in make_groups(config, 2, (120, 4) if kind == "gspo" else (4,))]
    if kind == "gspo":  # the longest sample is alone in its micro-batch, and the middle of it in its response
        steps = [step for group in groups for trajectory in group.trajectories for step in trajectory.steps]
        lengths = [len(step.prompt_token_ids) + len(step.response_token_ids) for step in steps]
        config.trainer.tokens_per_microbatch = max(lengths)
    learner, packer = make_learner(config, platform), make_sequence_packer(config, platform)
    if kind == "gspo":
        learner = replace(learner, reference=make_reference(learner.chunks, config))
    first_step = _FirstStep(learner)
    found: dict[str, Any] = {"updated": (*update(first_step, config, platform, groups, packer), weights_of(learner))}
    found["first step"] = first_step.found
    if kind == "critic":
        if not run.exists():
            torch.distributed.barrier()  # all ranks have looked
            save(learner, config, run, has_critic=True)
        resumed = make_learner(config, platform, with_weights=False)
        load_learner(latest_checkpoint(run), resumed)
        found["resumed"] = (*update(resumed, config, platform, groups, packer), weights_of(resumed))
    found["held"] = None if packer.prefetcher is None else packer.prefetcher.used_bytes
    found["shares"] = _shares_a_response(packer, groups, config)
    packer.close()
    return found


class _FirstStep:
    """A learner that compares what a first step computes for its minibatch with a pass before it, bit by bit."""

    def __init__(self, learner: Any) -> None:
        self._learner, self.found = learner, list[bool]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def train_step(self, microbatches: Any, proximal: Any, *rest: Any) -> Any:
        scored = self._learner.compute_logprobs(microbatches) if proximal is None else []
        metrics, current = self._learner.train_step(microbatches, proximal, *rest)
        if proximal is None:
            self.found.append(all(torch.equal(a, b) for a, b in zip(scored, current, strict=True)))
        return metrics, current


def _varied(group: Group) -> Group:
    """The group with versions of several ages, noise in its log-probabilities, and an incomplete teacher's."""

    def varied(trajectory: Trajectory) -> Trajectory:
        rng, steps = np.random.default_rng((trajectory.ticket, trajectory.index)), []
        for step in trajectory.steps:
            versions = rng.integers(-1, VERSION + 1, len(step.versions)).astype(np.int32)
            noise = rng.normal(0, 0.5, len(step.logprobs)).astype(np.float32)
            teacher = np.where(versions < 0, np.nan, step.logprobs - noise).astype(np.float32)
            steps.append(replace(step, versions=versions, logprobs=step.logprobs + noise, teacher_logprobs=teacher))
        return replace(trajectory, steps=tuple(steps))

    return replace(group, trajectories=tuple(map(varied, group.trajectories)))


def _shares_a_response(packer: Any, groups: list[Group], config: Config) -> bool:
    """Whether this rank has some, but not all tokens of a response."""
    from megatron_webrl.trainer.data.batching import training_samples

    shares = False
    for batch in packer.build(training_samples(groups, config, VERSION), "constant", 10):
        own = torch.bincount(batch.step_index, minlength=len(batch.step_lengths))
        shares |= bool(((own > 0) & (own < batch.step_lengths)).any())
    return shares


@pytest.mark.parametrize("cases", [*FIRST, pytest.param("rest", marks=pytest.mark.slow)])
def test_updates_and_resumes_do_not_depend_on_the_layout(
    cases: str, tmp_path: Path, tiny_model: Path, tiny_sparse_model: Path
) -> None:
    models = {"dense": str(tiny_model), "sparse": str(tiny_sparse_model)}
    if cases == "rest":
        models["qwen3_5"] = str(make_tiny_model(tmp_path / "qwen3_5", architecture="qwen3_5"))
    count, layouts = FIRST.get(cases, REST)
    ranks_found = results(train, tmp_path, models, layouts, ranks=count)
    found = {case: [rank[case] for rank in ranks_found] for case in ranks_found[0]}
    for (model, kind, layout), ranks in found.items():
        case, expected = f"{model}, {kind}, {layout}", found[model, kind, f"dp{count}"][0]
        one = ranks[0]
        for part in ("updated", "resumed") if kind == "critic" else ("updated",):
            (metrics, gap, weights), (wanted, wanted_gap, wanted_weights) = one[part], expected[part]
            assert all(rank[part][:2] == (metrics, gap) for rank in ranks), case
            # Four replicas compute an image more often that their samples share.
            names = wanted.keys() - ({"operations"} if count > 2 else set())
            assert metrics.keys() == wanted.keys()
            assert {name: metrics[name] for name in names} == {
                name: pytest.approx(wanted[name], rel=1e-3, abs=1e-6) for name in names
            }, (case, part)
            assert gap.tokens == wanted_gap.tokens > 0
            assert gap.largest == pytest.approx(wanted_gap.largest, rel=1e-3), case
            assert largest_difference(weights, wanted_weights) < 1e-5, (case, part)
            assert metrics["gradient_norm"] > 0
            assert 0 < metrics["clipped"] < metrics["response_tokens"] < metrics["tokens"], case
            assert undocumented(loss_metrics(metrics)) == []
            if kind == "grpo":
                scored, missing = metrics["teacher_kl/count"], metrics["teacher_missing"]
                assert 0 < missing < metrics["response_tokens"] == scored + missing, case
            if kind == "gspo":
                assert 0 < metrics["lag_masked"] < metrics["response_tokens"], case
            if kind == "critic":
                assert (metrics["value_mean"] != 0) == (part == "resumed")
                assert metrics["value_loss"] > 0
                assert float(weights["value_head"].abs().max()) > 1e-4
        assert all(rank["first step"] == [True] * (kind != "critic") for rank in ranks), case
        if "cp2" in layout and kind == "gspo":
            assert any(rank["shares"] for rank in ranks), case  # else nothing of a response is reduced
        if layout in AHEAD:
            # A later pipeline stage encodes no image.
            assert [rank["held"] for rank in ranks] == ([0, None] if "pp2" in layout else [0, 0]), case
