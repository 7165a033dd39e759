"""Off-policy control: weights per level, bounds, masks and their metrics; the losses are in test_objective.py."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.trainer.loss.objective import off_policy_correction, policy_loss
from megatron_webrl.trainer.loss.token_data import LOG_RATIO_LIMIT
from tests.trainer.loss.by_hand import VERSION, beyond, example, responses, tensors, used_weight

BOUNDS = {"importance_weight_floor": 0.6, "importance_weight_cap": 1.5, "max_token_lag": 3, "kl_rejection_bound": 0.25}
CONFIGS = [
    loss_config(importance_weight_level=level, importance_weight_mode=mode, kl_rejection_estimator=estimator, **BOUNDS)
    for level, mode, estimator in product(
        ("auto", "geometric", "product"), ("mask", "truncate"), ("k1", "k3")
    )
]  # fmt: skip


def test_weights_and_shares_are_those_of_the_equations() -> None:
    data = example(2, (8, 3, 11, 5, 7, 2, 9, 4) * 8)
    tokens, counted = [(response, t) for response in responses(data) for t in response], data["weight"] > 0
    for config in CONFIGS:
        correction = off_policy_correction(tensors(data), config, None, VERSION)
        wanted = [used_weight(response, t, data, config) for response, t in tokens]
        np.testing.assert_allclose(correction.weight.numpy(), wanted, rtol=1e-9, err_msg=str(config))
        assert torch.equal(correction.masked, correction.weight == 0)
        _, sums = policy_loss(torch.from_numpy(data["current"]), tensors(data), config, None, VERSION)
        for name in ("importance_weight_capped", "importance_weight_floored", "kl_rejected", "lag_masked"):
            found = [beyond(response, t, data, config)[1][name] for response, t in tokens]
            assert correction.beyond[name].tolist() == found, (config, name)
            assert 0 < sums[name].item() == np.sum(found * counted) < np.sum(counted), (config, name)


def test_without_bounds_only_the_cap_is_measured() -> None:
    data = example(3)
    for config in (loss_config(), loss_config(decoupled=False)):
        correction = off_policy_correction(tensors(data), config)
        assert set(correction.beyond) == {"importance_weight_capped"}
        assert correction.masked.any() == config.decoupled
    assert (correction.weight == 1).all()


def test_the_cap_acts_on_the_product_over_a_response_where_the_geometric_mean_hides_it() -> None:
    """20 tokens of ratio 1.2: a mean of 1.2, a product of 38."""
    data = example(0, (20,)) | {"weight": np.ones(20)}
    data["behaviour_logprobs"] = data["proximal_logprobs"] - math.log(1.2)
    for name, level, kept in (("gspo", "auto", 1.2), ("grpo", "auto", 1.2), ("gspo", "product", 0.0)):
        config = loss_config(name=name, importance_weight_level=level)
        weight = off_policy_correction(tensors(data), config).weight
        np.testing.assert_allclose(weight.numpy(), kept)
    truncated = replace(config, importance_weight_mode="truncate")
    assert (off_policy_correction(tensors(data), truncated).weight == 5).all()


def test_a_product_beyond_every_float_stays_finite() -> None:
    data = example(0, (20,))
    for sign in (1, -1):
        data["behaviour_logprobs"] = data["proximal_logprobs"] - sign * 50
        config = loss_config(importance_weight_level="product", importance_weight_cap=math.inf)
        weight = off_policy_correction(tensors(data), config).weight
        np.testing.assert_allclose(weight.numpy(), math.exp(sign * LOG_RATIO_LIMIT))
