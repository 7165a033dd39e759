"""Loss variants through the whole learner, on one gloo process with a tiny Qwen3-VL and images."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer import loop
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from tests.gloo import spawn
from tests.metrics_page import undocumented
from tests.trainer import variant_ranks
from tests.trainer.credit.made_groups import plain_group


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("variants")
    spawn(variant_ranks.run, str(folder), str(tiny_model), ranks=1)
    return torch.load(folder / "found.pt", weights_only=False)


def assert_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, ones, others))


def test_the_reference_is_the_policy_after_the_warm_start(found: dict[str, Any]) -> None:
    reference = found["reference"]
    assert_equal(reference["start"], reference["reference"])
    assert reference["moved"] > 0.01
    assert reference["weights unchanged"]


def test_the_divergence_is_zero_at_first_and_grows_as_the_policy_moves(found: dict[str, Any]) -> None:
    first, *later = [metrics["reference_kl"] for metrics in found["reference"]["figures"]]
    assert first == 0
    assert all(value > 1e-4 for value in later)


def test_a_strong_penalty_pulls_the_policy_back_to_the_reference(found: dict[str, Any]) -> None:
    divergences = found["reference"]["strong"]
    assert min(divergences[1:]) < 0.7 * divergences[0]


def test_a_resumed_run_keeps_the_reference_of_its_start(found: dict[str, Any]) -> None:
    reference = found["reference"]
    assert_equal(reference["start"], reference["resumed reference"])
    assert_equal(reference["at checkpoint"], reference["resumed"])


@pytest.mark.parametrize(
    ("name", "scored", "whole"), [("raft", 0, False), ("raft_plus_plus", 2, False), ("grpo", 2, True)]
)
def test_only_a_loss_with_ratios_scores_first_and_only_a_baseline_keeps_groups_whole(
    name: str, scored: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a learner that notes its calls, without a model."""
    config, seen, split = Config(), [], batching.minibatches
    config.trainer.loss, config.trainer.minibatches = loss_config(name), 2
    learner, packer = mock.MagicMock(reference=None), mock.MagicMock()
    packer.build_all.side_effect = lambda parts, *_: [["microbatch"] for _ in parts]
    learner.compute_reference_logprobs.side_effect = lambda parts: [None for _ in parts]
    learner.train_step.return_value = {"operations": 1.0, "tokens": 1.0}, []
    monkeypatch.setattr(loop, "parallel_state", mock.MagicMock())
    monkeypatch.setattr(loop, "measure_logprob_mismatch", lambda *_: None)
    monkeypatch.setattr(loop.batching, "minibatches", lambda *a: (seen.append(a[-1]), split(*a))[1])
    groups = [plain_group([True, False], [1, 2], ticket=ticket) for ticket in range(4)]
    loop.train_batch(learner, packer, config, groups, version=0)
    assert (learner.score.call_count, learner.train_step.call_count, seen) == (scored, 2, [whole])


def test_on_policy_nothing_is_clipped_with_any_kind_of_ratio(found: dict[str, Any]) -> None:
    variants = found["variants"]
    for metrics in (variants["grpo"], variants["gspo"]):
        assert metrics["clipped"] == metrics["dual_clipped"] == 0
        assert metrics["policy_ratio"] == pytest.approx(metrics["response_tokens"])
    # GSPO averages behaviour weights over a response, so the gradient norms differ.
    assert variants["gspo"]["gradient_norm"] != variants["grpo"]["gradient_norm"]
    assert variants["gspo"]["behaviour_importance_weight"] != variants["grpo"]["behaviour_importance_weight"]


def test_every_loss_has_defined_metrics(found: dict[str, Any]) -> None:
    updates = [*found["reference"]["figures"], *found["variants"]["raft"]]
    updates += [found["variants"][name] for name in ("grpo", "gspo", "coupled", "shuffled")]
    for totals in updates:
        assert undocumented(loss_metrics(totals)) == []
    assert "reference_kl" in loss_metrics(updates[0])


def test_without_decoupling_the_same_tokens_are_clipped(found: dict[str, Any]) -> None:
    """The engine's log-probabilities are far from the model's: the weight corrects for it, or clipping stops it."""
    decoupled, coupled = found["variants"]["grpo"], found["variants"]["coupled"]
    assert decoupled["clipped"] == 0 < coupled["clipped"]
    assert decoupled["behaviour_importance_weight"] == pytest.approx(coupled["policy_ratio"], rel=1e-5)
    assert coupled["behaviour_importance_weight"] == coupled["response_tokens"]


def test_shuffled_advantages_make_another_step(found: dict[str, Any]) -> None:
    plain, shuffled = found["variants"]["grpo"], found["variants"]["shuffled"]
    assert shuffled["response_tokens"] == plain["response_tokens"]
    assert shuffled["loss"] != plain["loss"]


def test_imitation_raises_the_likelihood_of_successes(found: dict[str, Any]) -> None:
    losses = [metrics["loss"] for metrics in found["variants"]["raft"]]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_a_teacher_alone_pulls_the_student_towards_it(found: dict[str, Any]) -> None:
    before, after = found["distillation"]["distances"]
    assert before > 0.1
    assert after < 0.5 * before
    for totals in found["distillation"]["updates"]:
        assert totals["advantage/squares"] == 0  # of the rewards
        assert totals["teacher_missing"] == 0 < totals["gradient_norm"]
        assert totals["teacher_kl/count"] == totals["response_tokens"]
        assert undocumented(loss_metrics(totals)) == []
