"""The step critic through the whole learner, with a tiny Qwen3-VL and images, in several layouts of two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.trainer.metrics.token_metrics import CRITIC_METRICS, loss_metrics
from tests.gloo import spawn
from tests.metrics_page import undocumented
from tests.trainer import critic_ranks

LAYOUTS = pytest.mark.parametrize("layout", critic_ranks.LAYOUTS)


@pytest.fixture(scope="module")
def laid_out(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, list[dict[str, Any]]]:
    """Layout -> observations of each rank."""
    folder = tmp_path_factory.mktemp("critic-layouts")
    spawn(critic_ranks.across_layouts, str(folder), str(tiny_model))
    return {name: torch.load(folder / f"found-{name}.pt", weights_only=False) for name in critic_ranks.LAYOUTS}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("critic")
    spawn(critic_ranks.on_one_rank, str(folder), str(tiny_model), ranks=1)
    return torch.load(folder / "found.pt", weights_only=False)


def assert_close(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        assert float((tensor - expected[name]).abs().max()) < 1e-5, name


@LAYOUTS
def test_an_update_with_a_critic_does_not_depend_on_the_layout(laid_out: dict[str, Any], layout: str) -> None:
    one, replicas = laid_out[layout][0], laid_out["dp2"][0]
    for metrics, expected in zip(one["metrics"], replicas["metrics"], strict=True):
        assert metrics == {name: pytest.approx(value, rel=1e-3, abs=1e-6) for name, value in expected.items()}
        assert metrics["value_loss"] > 0
    assert one["metrics"][0]["value_mean"] == 0 != one["metrics"][1]["value_mean"]
    assert float(one["weights"]["value_head"].abs().max()) > 1e-4
    assert_close(one["weights"], replicas["weights"])


@LAYOUTS
def test_every_rank_has_the_same_metrics_and_the_same_head(laid_out: dict[str, Any], layout: str) -> None:
    first, second = laid_out[layout]
    assert first["metrics"] == second["metrics"]
    assert torch.equal(first["weights"]["value_head"], second["weights"]["value_head"])


@LAYOUTS
def test_a_checkpoint_with_a_critic_resumes_in_every_layout(laid_out: dict[str, Any], layout: str) -> None:
    """The second update after a resume equals that of the run that saved, which depends on the head's moments too."""
    resumed, straight = laid_out[layout][0], laid_out[critic_ranks.SAVED_IN][0]
    expected = {name: pytest.approx(value, rel=1e-3, abs=1e-6) for name, value in straight["metrics"][1].items()}
    assert resumed["resumed metrics"] == expected
    assert_close(resumed["resumed weights"], straight["weights"])


def test_the_critic_learns_returns_that_depend_on_the_step(found: dict[str, Any]) -> None:
    explained = [metrics["explained_variance"] for metrics in found["learning"]]
    errors = [metrics["value_loss"] for metrics in found["learning"]]
    assert explained == sorted(explained)
    assert explained[0] == 0
    assert explained[-1] > 0.9
    assert errors[0] == pytest.approx(((0.5 * 0.95) ** 2 + 1) / 2)  # of values 0: lambda is 0.95
    assert min(errors) < 0.1 * errors[0]


def test_a_warm_up_changes_the_head_alone(found: dict[str, Any]) -> None:
    for changes in found["warm-up"]:
        head, policy, steps = changes["warm-up"]
        assert head > 1e-4
        assert (policy, steps) == (0, critic_ranks.STEPS)
        head, policy, steps = changes["later"]
        assert min(head, policy) > 1e-4
        assert steps == critic_ranks.STEPS  # counted from the end of the warm-up on


def test_the_head_is_in_single_precision_and_resumes_bit_for_bit(found: dict[str, Any]) -> None:
    half = found["half"]
    assert half["dtypes"].keys() == {"torch.bfloat16", "torch.float32"}
    assert half["dtypes"]["torch.float32"] == "value_head.weight"
    assert half["straight"] == half["resumed"]
    assert torch.equal(*half["heads"])


def test_a_checkpoint_of_a_run_without_a_critic_is_refused_and_the_reverse(found: dict[str, Any]) -> None:
    others = found["others"]
    assert "tensor value_head.weight [1, 128] is missing from " in others["no critic"]
    assert "tensor value_head.weight of " in others["critic"]
    for name in ("no critic", "critic"):
        assert "\n" not in others[name]


def test_a_run_starts_from_the_weights_of_either_with_an_untrained_head(found: dict[str, Any]) -> None:
    others = found["others"]
    assert others["no critic, weights"]
    assert others["critic, weights"]
    assert not others["no critic, head"].any()
    assert others["critic, head"] is None


def test_the_metrics_of_a_critic_are_defined(found: dict[str, Any]) -> None:
    metrics = loss_metrics(found["learning"][-1])
    assert undocumented(metrics) == []
    assert metrics.keys() >= set(CRITIC_METRICS)


def test_a_converted_checkpoint_has_the_weights_of_the_policy_alone(found: dict[str, Any]) -> None:
    assert found["others"]["converted"] == found["others"]["expected"]
