"""The teacher's advantages against an independent computation, finite differences, and the reverse KL itself."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import LossConfig, loss_config
from megatron_webrl.trainer.loss import objective
from megatron_webrl.trainer.loss.objective import SURROGATES, make_objective
from tests.trainer.loss.by_hand import LARGEST, VERSION, Arrays, by_hand, example, tensors

TEACHER = DistillationConfig(coefficient=0.7)
CLIP = 1.0
VARIANTS = [
    loss_config(name=name, decoupled=decoupled, kl_coefficient=kl)
    for name in SURROGATES
    if name != "raft_plus_plus"
    for decoupled, kl in ((True, 0.0), (False, 0.3))
]


@pytest.fixture(autouse=True)
def small_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "TEACHER_CLIP", CLIP)


def scored(seed: int, lengths: tuple[int, ...] = (9, 1, 14, 6, 3, 20)) -> Arrays:
    """An example whose teacher is up to some nats from the policy; a fifth of the tokens has none."""
    data, rng = example(seed, lengths), np.random.default_rng(seed + 100)
    tokens = sum(lengths)
    teacher = np.minimum(data["proximal_logprobs"] + rng.normal(0, 1.0, tokens), LARGEST)
    return data | {"teacher_logprobs": np.where(rng.random(tokens) < 0.2, math.nan, teacher)}


def advantages(data: Arrays, config: LossConfig) -> np.ndarray:
    """A + coefficient * clip(log teacher - log old), token by token."""
    old = data["proximal_logprobs"] if config.decoupled else data["behaviour_logprobs"]
    found = []
    for advantage, teacher, before in zip(data["advantage"], data["teacher_logprobs"], old, strict=True):
        extra = 0.0 if math.isnan(teacher) else min(max(teacher - before, -CLIP), CLIP)
        found.append(advantage + TEACHER.coefficient * extra)
    return np.array(found)


def test_the_loss_and_its_gradient_equal_a_computation_by_hand() -> None:
    data = scored(3)
    for config in VARIANTS:
        tensor = torch.from_numpy(data["current"]).requires_grad_()
        loss, _ = make_objective(config, None, VERSION, TEACHER)(tensor, tensors(data))
        loss.backward()
        mixed = data | {"advantage": advantages(data, config)}
        assert loss.item() == pytest.approx(by_hand(data["current"], mixed, config), rel=1e-9), config
        assert loss.item() != pytest.approx(by_hand(data["current"], data, config), rel=1e-3), config
        for token, step in enumerate(np.eye(len(tensor)) * 1e-6):
            ends = [by_hand(data["current"] + sign * step, mixed, config, data["current"]) for sign in (1, -1)]
            assert tensor.grad[token].item() == pytest.approx((ends[0] - ends[1]) / 2e-6, abs=1e-6), (config, token)


def test_on_policy_the_expected_gradient_is_that_of_the_reverse_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all tokens of a small vocabulary, weighted by the policy, without rewards."""
    monkeypatch.setattr(objective, "TEACHER_CLIP", 100.0)
    rng = np.random.default_rng(1)
    logits, other = rng.normal(0, 1, (2, 40))
    teacher = other - np.log(np.exp(other).sum())

    def divergence(values: np.ndarray) -> float:
        now = values - np.log(np.exp(values).sum())
        return float((np.exp(now) * (now - teacher)).sum())

    tensor = torch.from_numpy(logits).requires_grad_()
    current = torch.log_softmax(tensor, dim=0)
    now = current.detach().numpy()
    data = example(0, (40,)) | {
        "proximal_logprobs": now, "behaviour_logprobs": now, "advantage": np.zeros(40), "weight": np.exp(now),
        "teacher_logprobs": teacher,
    }  # fmt: skip
    loss, sums = make_objective(loss_config(), None, VERSION, TEACHER)(current, tensors(data))
    loss.backward()
    step = 1e-5
    for place in range(40):
        moved = np.eye(40)[place] * step
        wanted = (divergence(logits + moved) - divergence(logits - moved)) / (2 * step)
        assert tensor.grad[place].item() == pytest.approx(TEACHER.coefficient * wanted, abs=1e-7)
    assert float(tensor.grad.abs().max()) > 0.01
    assert sums["teacher_kl/count"] == 40


def test_metrics_count_scored_missing_and_clipped_tokens() -> None:
    data = scored(7)
    _, sums = make_objective(loss_config(), None, VERSION, TEACHER)(torch.from_numpy(data["current"]), tensors(data))
    counted, missing = data["weight"] > 0, np.isnan(data["teacher_logprobs"])
    ratio = (data["behaviour_logprobs"] - data["teacher_logprobs"])[counted & ~missing]
    far = np.abs(np.nan_to_num(data["teacher_logprobs"] - data["proximal_logprobs"])) > CLIP
    assert sums["teacher_missing"] == (counted & missing).sum() > 0
    assert sums["teacher_clipped"] == (counted & far).sum() > 0
    assert sums["teacher_kl/count"] == len(ratio)
    assert sums["teacher_kl/sum"].item() == pytest.approx(ratio.sum())


def test_without_scores_or_with_those_of_the_policy_the_loss_is_that_of_the_rewards() -> None:
    same, without = scored(5), example(2)
    same["teacher_logprobs"] = same["proximal_logprobs"]
    for data, missing in ((same, False), (without, True)):
        current = torch.from_numpy(data["current"])
        loss, sums = make_objective(loss_config(), None, VERSION, TEACHER)(current, tensors(data))
        assert loss.item() == make_objective(loss_config(), None, VERSION)(current, tensors(data))[0].item()
        counted = (data["weight"] > 0).sum()
        assert (sums["teacher_missing"], sums["teacher_kl/count"]) == ((counted, 0) if missing else (0, counted))


def test_nan_of_a_policy_reaches_the_gradient() -> None:
    for where in ("behaviour_logprobs", "proximal_logprobs"):
        data = scored(4)
        data[where] = np.full_like(data[where], math.nan)
        tensor = torch.from_numpy(data["current"]).requires_grad_()
        make_objective(loss_config(), None, VERSION, TEACHER)(tensor, tensors(data))[0].backward()
        assert torch.isnan(tensor.grad).any(), where
