"""Every metric has one definition, and every definition a metric."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.track.evaluation.evaluation_queue import VARIANTS, EvaluationRequest, EvaluationResult
from megatron_webrl.track.evaluation.results import aggregate_results
from megatron_webrl.track.evaluation.results import mlflow_metrics as evaluation_metrics
from megatron_webrl.track.metric_reference.registry import SECTIONS, definitions_of, undefined
from megatron_webrl.track.metrics import UpdateMetrics, UpdateSeconds, episode_metrics, update_metrics
from megatron_webrl.track.step_metrics import step_metrics
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.credit.rewards import outcome_reward
from megatron_webrl.trainer.credit.step_critic import critic_credit
from megatron_webrl.trainer.loss.objective import make_objective
from megatron_webrl.trainer.loss.token_data import StepValues, TokenData
from megatron_webrl.trainer.metrics.credit_metrics import credit_metrics
from megatron_webrl.trainer.metrics.group_statistics import GroupStatistics
from megatron_webrl.trainer.metrics.logprob_mismatch import LagMismatch, LogprobMismatch
from megatron_webrl.trainer.metrics.token_metrics import PER_STEP_METRICS, loss_metrics, token_statistics
from megatron_webrl.types import Group, JudgeStage, Verdict
from tests.trajectories import trajectory

ROOT = Path(__file__).parents[2]
BY_MODULE = {
    module: [metric for section in SECTIONS if section.module == module for metric in section.metrics]
    for module in {section.module for section in SECTIONS}
}
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
    statistics.add_dropped(MIXED, "stale")
    return statistics.pop_metrics()


def accounting_example() -> dict[str, float]:
    accounting = Accounting()
    accounting.count_episode(trajectory(), "a reason: of the user's own / with odd characters")
    return accounting.wasted_token_shares()


def evaluation_example() -> dict[str, float]:
    results = [EvaluationResult(0, 0, "t", "miniwob", "click-test", "easy", "success", 2, 20, 1.5, (3, 4), "w.1")]
    request = EvaluationRequest(number=1, kind="before", tasks=1, samples=1, temperature=0.0, version=3, exclusive=True)
    lines = [aggregate_results(replace(request, variant=variant), results, 1.0) for variant in VARIANTS]
    return {name: value for line in lines for name, value in evaluation_metrics(line).items()}


def mismatch_example() -> dict[str, float]:
    return LogprobMismatch({0: LagMismatch(3, 0.1, 0.1, 0.1, 0.1)}).metrics()


EXAMPLES = {
    "track/metrics.py": update_example() | episode_metrics([MIXED]),
    "track/step_metrics.py": step_metrics([MIXED], uses_memory=True),
    "trainer/metrics/token_metrics.py": loss_example(),
    "trainer/metrics/credit_metrics.py": credit_metrics([MIXED], advantage_config(overlong="mask", anchor_weight=1.0)),
    "trainer/metrics/logprob_mismatch.py": mismatch_example(),
    "trainer/metrics/group_statistics.py": group_example(),
    "trainer/accounting.py": accounting_example(),
    "track/evaluation/results.py": evaluation_example(),
}
"""Metrics of the pure functions, by the module that computes them."""


@pytest.mark.parametrize("module", EXAMPLES)
def test_every_metric_of_a_function_has_one_definition(module: str) -> None:
    assert EXAMPLES[module]
    assert undefined(EXAMPLES[module]) == []


@pytest.mark.parametrize("module", EXAMPLES)
def test_a_function_computes_every_metric_that_is_defined_for_it(module: str) -> None:
    missing = [each.name for each in BY_MODULE[module] if not any(map(each.matches, EXAMPLES[module]))]
    assert missing == []


@pytest.mark.parametrize("module", sorted(BY_MODULE.keys() - EXAMPLES.keys()))
def test_a_module_names_every_metric_that_is_defined_for_it(module: str) -> None:
    """Modules that need ranks, engines or several nodes; their runs are checked in tests/finished_runs.py."""
    source = (ROOT / "megatron_webrl" / module).read_text()
    assert [each.name for each in BY_MODULE[module] if f'"{each.name.partition("<")[0]}' not in source] == []


def test_every_definition_has_a_meaning_and_a_name_of_its_own():
    definitions = [metric for section in SECTIONS for metric in section.metrics]
    assert len({metric.name for metric in definitions}) == len(definitions) > 100
    assert all(metric.meaning.endswith(".") and "|" not in metric.meaning for metric in definitions)
    assert all((ROOT / "megatron_webrl" / section.module).is_file() for section in SECTIONS)


def test_a_label_of_a_family_has_no_further_part():
    assert [metric.name for metric in definitions_of("success_rate/shop")] == ["success_rate/<environment>"]
    assert undefined(["success_rate/shop/cart", "success_rate/", "entropy/success", "loss"]) == [
        "success_rate/", "success_rate/shop/cart",
    ]  # fmt: skip
