"""The learner on two gloo processes: tensor-parallel 2, then two replicas, with a tiny Qwen3-VL and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_webrl.trainer.metrics.logprob_mismatch import BOUND, LagMismatch, LogprobMismatch
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from tests.gloo import spawn
from tests.metrics_page import undocumented
from tests.trainer import learner_ranks

SIZES = pytest.mark.parametrize("size", [1, 2])
Found = dict[tuple[int, int], dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Found:
    """(tensor-parallel size, rank) -> observations of that rank."""
    folder = tmp_path_factory.mktemp("learner")
    spawn(learner_ranks.run, str(folder), str(tiny_model))
    return {
        (size, rank): torch.load(folder / f"found-{size}-{rank}.pt", weights_only=False)
        for size in (2, 1)
        for rank in (0, 1)
    }


def assert_same(one: tuple[dict[str, float], Any], other: tuple[dict[str, float], Any], rel: float) -> None:
    assert one[0] == {name: pytest.approx(value, rel=rel, abs=1e-6) for name, value in other[0].items()}
    assert one[1].tokens == other[1].tokens > 0
    assert one[1].largest == pytest.approx(other[1].largest, rel=rel)


def test_an_update_does_not_depend_on_the_layout_of_the_ranks(found: Found):
    two, replicas = found[2, 0], found[1, 0]
    for part in ("first", "second"):
        assert_same(two[part], replicas[part], rel=1e-3)
    largest = max(float((two["weights"][name] - tensor).abs().max()) for name, tensor in replicas["weights"].items())
    assert largest < 1e-5


@SIZES
def test_all_ranks_return_the_same_metrics(found: Found, size: int):
    assert found[size, 0]["first"] == found[size, 1]["first"]


@SIZES
def test_an_update_changes_the_weights_and_reports_the_loss(found: Found, size: int):
    metrics, _ = found[size, 0]["first"]
    assert metrics["gradient_norm"] > 0
    assert 0 < metrics["clipped"] < metrics["response_tokens"] < metrics["tokens"]
    # Two epochs and a pass for log-probabilities, a third of an epoch, against one epoch over the same tokens.
    single, _ = found[size, 0]["single"]["all"]
    assert metrics["tokens"] == 2 * single["tokens"]
    assert metrics["operations"] == pytest.approx(7 / 3 * single["operations"], rel=1e-5)
    assert found[size, 0]["first"][0]["loss"] != found[size, 0]["second"][0]["loss"]


@SIZES
def test_a_gradient_above_the_norm_limit_counts_as_clipped(found: Found, size: int):
    large, small = (found[size, 0]["single"][name] for name in ("one sample", "small gradient"))
    assert (large["gradient_norm"] > 1.0, large["gradient_clipped"]) == (True, 1.0)
    assert (small["gradient_norm"] < 1.0, small["gradient_clipped"]) == (True, 0.0)
    assert 0 < found[size, 0]["first"][0]["gradient_clipped"] < 1  # the mean over four steps


@SIZES
def test_training_resumes_from_a_checkpoint_bit_for_bit(found: Found, size: int):
    result = found[size, 0]
    assert result["second"] == result["second again"]
    assert result["rate"] == result["rate again"]
    assert result["changes"] == []
    for name, tensor in result["weights"].items():
        assert torch.equal(tensor, result["weights again"][name])


@SIZES
def test_prefetched_images_change_no_bit_and_free_their_memory(found: Found, size: int):
    assert found[size, 0]["second"] == found[size, 0]["second again"]
    for rank in (0, 1):
        assert found[size, rank]["pixels"]["held"] == 0
        assert found[size, rank]["pixels"]["jobs"] > 0


def test_a_resume_continues_the_configured_schedule_and_names_what_has_changed(found: Found):
    resumed, fresh = found[1, 0]["changed rates"]
    assert resumed == fresh != found[1, 0]["rate again"]
    assert found[1, 0]["other changes"] == [
        "learning_rate 0.003, now 0.006",
        "final learning rate 0.0003, now 0.0006",
        "schedule cosine, now linear",
        "steps of warm-up 0, now 1",
        "steps until the final learning rate 17, now 49",
    ]


def test_the_learning_rate_of_an_update_is_that_of_its_steps(found: Found):
    rates = found[1, 0]["rates"]
    assert len(set(rates)) == len(rates)
    assert found[1, 0]["first"][0]["learning_rate"] == pytest.approx(np.mean(rates))


def test_training_resumes_at_another_tensor_parallel_size(found: Found):
    assert_same(found[2, 0]["second"], found[1, 0]["second elsewhere"], rel=1e-3)


@SIZES
def test_a_checkpoint_keeps_the_rest_of_the_state(found: Found, size: int):
    state = found[size, 0]["state"]
    assert (state.version, state.closed_tickets, state.open_tickets) == (learner_ranks.VERSION + 1, 4, (5,))
    assert state.accounting == {"trained": 8, "dropped": {}, "tokens_trained": 0, "tokens_dropped": {}}
    assert state.episode_log_bytes == 77


@SIZES
def test_a_single_step_has_nothing_to_clip(found: Found, size: int):
    metrics, gap = found[size, 0]["single"]["all"]
    assert metrics["clipped"] == 0
    assert metrics["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert gap.tokens == metrics["response_tokens"]


@SIZES
def test_statistics_of_tokens_are_those_of_all_ranks_and_micro_batches(found: Found, size: int):
    ranks = [found[size, rank]["single"]["tokens"] for rank in ((0, 1) if size == 1 else (0,))]
    metrics = ranks[0]["metrics"]
    names = ("current", "behaviour_logprobs", "advantage", "weight", "succeeded")
    current, behaviour, advantage, weight, succeeded = (np.concatenate([r[name] for r in ranks]) for name in names)
    counted = weight > 0
    assert metrics["response_tokens"] == counted.sum()
    assert 0 < metrics["success_tokens"] == succeeded[counted].sum() < metrics["response_tokens"]
    assert 0 < metrics["success_entropy"] < metrics["entropy"]
    moved = (current - behaviour)[counted]
    assert metrics["behaviour_kl_k1"] == pytest.approx(-moved.sum(), rel=1e-4)
    assert metrics["behaviour_kl_k3"] == pytest.approx((np.exp(moved) - 1 - moved).sum(), rel=1e-4)
    clipped = counted & (advantage > 0)  # the ratio is exp(0.5) everywhere
    chosen = {"current_logprob": (current, counted), "behaviour_logprob": (behaviour, counted),
              "advantage": (advantage, counted), "clipped_logprob": (current, clipped)}  # fmt: skip
    for name, (values, mask) in chosen.items():
        values = values[mask].astype(float)
        wanted = {"count": len(values), "sum": values.sum(), "squares": (values**2).sum()}
        assert {key: metrics[f"{name}/{key}"] for key in wanted} == pytest.approx(wanted, rel=1e-5, abs=1e-4)


@SIZES
def test_the_mismatch_of_each_version_lag_is_that_of_all_ranks(found: Found, size: int):
    ranks = [found[size, rank]["single"]["mismatch"] for rank in ((0, 1) if size == 1 else (0,))]
    versions, differences, counted = (
        np.concatenate([rank[name] for rank in ranks]) for name in ("versions", "differences", "counted")
    )
    lags = np.minimum(7 - versions, 4)
    assert set(ranks[0]["found"].by_lag) == {0, 1, 2, 3, 4}
    for lag, measured in ranks[0]["found"].by_lag.items():
        d = differences[counted & (versions >= 0) & (lags == lag)].astype(float)
        assert measured.tokens == len(d)
        wanted = [np.abs(d).mean(), (np.exp(d) - 1 - d).mean(), np.abs(d).max(), (np.abs(d) > BOUND).mean()]
        assert [measured.mean, measured.kl, measured.largest, measured.beyond] == pytest.approx(wanted, abs=1e-5)


def test_a_mean_mismatch_under_the_same_weights_is_an_alarm_and_one_of_older_weights_is_not():
    large, small = LagMismatch(10, 0.2, 0.02, 1.5, 0.5), LagMismatch(10, 0.01, 0.0, 0.1, 0.0)
    (text,) = LogprobMismatch({0: large, 1: small}).alarms()
    assert "of 10 tokens under the same weights differ by 0.2 nats in the mean and 1.5 at most" in text
    assert LogprobMismatch({0: small, 1: large}).alarms() == []
    assert LogprobMismatch({1: large}).alarms() == []


def test_a_divergence_is_an_alarm_at_any_lag():
    large, small = LagMismatch(10, 0.01, 0.6, 1.5, 0.5), LagMismatch(10, 0.01, 0.4, 0.1, 0.0)
    (text,) = LogprobMismatch({1: small, 2: large}).alarms()
    assert "diverged from the engine by 0.6 nats over 10 tokens of version lag 2, which differ by 1.5 at most" in text
    assert "(above 0.5)" in text


@SIZES
def test_without_a_clipped_token_none_is_counted(found: Found, size: int):
    metrics, _ = found[size, 0]["single"]["all"]
    assert metrics["clipped_logprob/count"] == 0


@SIZES
@pytest.mark.parametrize("part", ["first", "second"])
def test_the_metrics_of_an_update_are_finite_and_defined(found: Found, size: int, part: str):
    totals, _ = found[size, 0][part]
    metrics = loss_metrics(totals)
    assert undocumented(metrics) == []
    assert np.isfinite([*metrics.values()]).all()
    assert metrics["advantage_std"] > 0
    assert metrics["behaviour_logprob_mean"] == pytest.approx(-6)  # of every token of the groups


def test_a_replica_without_samples_adds_nothing(found: Found):
    alone, spread = found[2, 0]["single"]["one sample"], found[1, 0]["single"]["one sample"]
    assert spread == {name: pytest.approx(value, rel=1e-3, abs=1e-6) for name, value in alone.items()}


@SIZES
def test_a_gradient_that_is_not_finite_changes_no_weight(found: Found, size: int):
    assert "the gradient norm is nan" in found[size, 0]["single"]["error"]
    assert found[size, 0]["single"]["unchanged"]
