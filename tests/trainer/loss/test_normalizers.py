"""The weights of tokens against their equations."""

from __future__ import annotations

import pytest

from megatron_webrl.trainer.data.batching import token_weight


def test_normalizers_weigh_trajectories_by_their_equations() -> None:
    size = {"trajectories": 4, "tokens": 200}
    wanted = {
        "constant": 1 / 40,
        "per_trajectory": 1 / 48,
        "token_mean": 1 / 200,
        "async_webrl_constant": 1 / 2000,
        "async_webrl_per_trajectory": 1 / 2400,
    }
    found = {name: token_weight(name, **size, steps=12, constant_steps=10) for name in wanted}
    assert found == pytest.approx(wanted)
    with pytest.raises(ValueError, match="'sum' is not one of constant, per_trajectory, token_mean, async_webrl_con"):
        token_weight("sum", **size, steps=1, constant_steps=1)


def test_the_released_form_is_a_token_mean_of_divided_advantages() -> None:
    """sum_t A / |tau| / tokens, the same for A / k: what AsyncWebRL's code computes before and in its mean."""
    steps, lengths, advantages = [3, 12], [40, 160], [1.5, -0.5]
    totals = (2, 200)
    for name, divisors in (("async_webrl_per_trajectory", steps), ("async_webrl_constant", [10, 10])):
        per_token = [a / d for a, d, n in zip(advantages, divisors, lengths, strict=True) for _ in range(n)]
        weights = [token_weight(name, *totals, each, 10) for each in steps]
        total = sum(w * a * n for w, a, n in zip(weights, advantages, lengths, strict=True))
        assert total == pytest.approx(sum(per_token) / len(per_token))
