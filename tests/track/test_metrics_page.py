"""docs/metrics.md describes every metric that is logged, and no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.track.evaluations import (
    VARIANTS,
    EvaluationRequest,
    EvaluationResult,
    aggregate_results,
    evaluation_metrics,
)
from megatron_webrl.track.metrics import UpdateMetrics, UpdateSeconds, episode_metrics, step_metrics, update_metrics
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.credit.rewards import outcome_reward
from megatron_webrl.trainer.credit.step_critic import critic_credit
from megatron_webrl.trainer.loss.objective import make_objective
from megatron_webrl.trainer.loss.token_data import StepValues, TokenData
from megatron_webrl.trainer.metrics.group_statistics import GroupStatistics, SelectionStatistics, credit_metrics
from megatron_webrl.trainer.metrics.logprob_mismatch import LagMismatch, LogprobMismatch
from megatron_webrl.trainer.metrics.token_metrics import PER_STEP_METRICS, loss_metrics, token_statistics
from megatron_webrl.types import Group, JudgeStage, Verdict
from tests.metrics_page import documented_metrics, matches, undocumented
from tests.trajectories import trajectory

ROOT = Path(__file__).parents[2]
STAGE = JudgeStage("rubric", "1", "yes", "", "", "model", attempts=2, errors=("timeout",))
VERDICT = Verdict("success", "judge", "rubric", stages=(STAGE,), calls=2)
LENIENT = replace(trajectory(0, 1).steps[0], leniencies=("url_without_scheme",), memory_characters=7)
MIXED = Group(0, (
    replace(trajectory(0, 0, reward=1.0, group_size=3), verdict=VERDICT),
    replace(trajectory(0, 1, group_size=3), steps=(LENIENT,)),
    trajectory(0, 2, outcome="blocked", group_size=3),
))  # fmt: skip


def update_example() -> dict[str, float]:
    seconds = UpdateSeconds(rollout=1, train=1, sync=1, wait=1, image_wait=1)
    return update_metrics(UpdateMetrics(1, 2, 0.5, 3.0, 4.0, 0.5, 1, 0.1, 1e-6, 10, 100.0, seconds).to_json())


def loss_example() -> dict[str, float]:
    """Totals of a real loss with every bound; the first token's gradient is clipped."""
    current, ones = torch.tensor([0.0, -1.0]), torch.ones(2)
    data = TokenData(
        behaviour_logprobs=current - 1, proximal_logprobs=current - 1, advantage=torch.tensor([1.0, -1.0]), weight=ones,
        step_index=torch.tensor([0, 1]), step_lengths=ones, reference_logprobs=current, versions=torch.tensor([1, 3]),
        teacher_logprobs=current - 1,
    )  # fmt: skip
    every = loss_config(kl_coefficient=0.1, importance_weight_floor=0.5, kl_rejection_bound=0.1, max_token_lag=4)
    data = replace(data, values=StepValues(current, ones, ones))
    critic, distillation = advantage_config("critic", coefficient=1.0), DistillationConfig(coefficient=1.0)
    critic_config = Config()
    critic_config.trainer.advantage = critic
    _, sums = make_objective(every, None, 3, distillation, critic)(current, data)
    sums |= token_statistics(current, ones, data, torch.tensor([True, False]))
    totals = {name: value.item() for name, value in sums.items()}
    totals |= {"tokens": 4.0, "replayed_tokens": 3.0}
    totals |= critic_credit([MIXED], {(0, 0, 0): 0.5, (0, 1, 0): 0.1}, critic_config).metrics
    return loss_metrics(totals | dict.fromkeys(PER_STEP_METRICS, 1.0))


def group_example() -> dict[str, float]:
    statistics = GroupStatistics(outcome_reward)
    statistics.add(MIXED)
    selection = SelectionStatistics()
    selection.add(MIXED, "stale")
    return statistics.pop_metrics() | selection.pop_metrics()


def accounting_example() -> dict[str, float]:
    accounting = Accounting()
    accounting.count_episode(trajectory(), "a reason: of the user's own / with odd characters")
    return accounting.wasted_token_shares()


def evaluation_example() -> dict[str, float]:
    results = [EvaluationResult(0, 0, "t", "miniwob", "click-test", "easy", "success", 2, 20, 1.5, (3, 4), "w.1")]
    request = EvaluationRequest(number=1, kind="before", tasks=1, samples=1, temperature=0.0, version=3, exclusive=True)
    lines = [aggregate_results(replace(request, variant=variant), results, 1.0) for variant in VARIANTS]
    return {name: value for line in lines for name, value in evaluation_metrics(line).items()}


EXAMPLES = (
    update_example()
    | episode_metrics([MIXED])
    | step_metrics([MIXED], uses_memory=True)
    | loss_example()
    | credit_metrics([MIXED], advantage_config(overlong="mask", anchor_weight=1.0))
    | LogprobMismatch({0: LagMismatch(3, 0.1, 0.1, 0.1, 0.1)}).metrics()
    | group_example()
    | accounting_example()
    | evaluation_example()
)
"""Metrics of the pure functions."""


def test_every_metric_of_a_function_is_on_the_page():
    assert undocumented(EXAMPLES) == []


def test_every_metric_on_the_page_is_computed_or_named_by_its_module():
    """Modules that need ranks, engines or several nodes only name theirs; tests/finished_runs.py checks their runs."""
    for module, names in documented_metrics().items():
        source = (ROOT / "megatron_webrl" / module).read_text()
        for name in names:
            computed = any(matches(name, example) for example in EXAMPLES)
            assert computed or f'"{name.partition("<")[0]}' in source, f"{name} of {module}"
