"""Steps at the same state, found and compared by hand and against loops over all pairs of steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.credit.advantages import ANCHOR_DISCOUNT, anchor_advantages, step_advantages, steps_by_state
from megatron_webrl.trainer.metrics.group_statistics import credit_metrics
from megatron_webrl.trainer.multi_node.screenshots import strip_images
from megatron_webrl.types import Group, Trajectory
from tests.trainer.credit.made_groups import varied_groups
from tests.trajectories import trajectory

PAGES = {"a": b"page a", "b": b"page b", "c": b"page c"}


def visits(index: int, pages: str, *, success: bool) -> Trajectory:
    """An episode that acts on pages of these names; each prompt shows all pages so far."""
    plain = trajectory(0, index, reward=float(success), steps=len(pages))
    steps = tuple(
        replace(step, url="http://shop.localhost/", images=np.arange(number + 1, dtype=np.int32),
                image_grids=np.ones((number + 1, 3), np.int32))
        for number, step in enumerate(plain.steps)
    )  # fmt: skip
    return replace(plain, steps=steps, images=tuple(PAGES[page] for page in pages))


def test_an_action_is_compared_with_others_at_the_same_page() -> None:
    # At b one episode turns to c and succeeds, the other returns to a and fails; nothing else tells them apart.
    good, bad = visits(0, "abc", success=True), visits(1, "aba", success=False)
    first, second = anchor_advantages([good, bad], 0.5, divide=False)
    at_a, at_b = [0.25, 0.0, 0.0], [0.5, 0.0]
    assert first.tolist() == pytest.approx([0.25 - np.mean(at_a), 0.5 - np.mean(at_b), 0.0])
    assert second.tolist() == pytest.approx([-np.mean(at_a), -np.mean(at_b), -np.mean(at_a)])
    divided = anchor_advantages([good, bad], 0.5, divide=True)
    assert divided[0].tolist() == pytest.approx([*(first[:2] / [np.std(at_a), np.std(at_b)]), 0.0], rel=1e-4)


def test_a_state_is_the_latest_screenshot_at_its_url() -> None:
    one, two = visits(0, "ab", success=True), visits(1, "bb", success=False)
    elsewhere = replace(two, index=2, steps=tuple(replace(step, url="http://wiki.localhost/") for step in two.steps))
    blind = trajectory(0, 3, steps=2)
    found = sorted(steps_by_state([one, two, elsewhere, blind]).values())
    assert found == [[(0, 0)], [(0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)]]
    assert sorted(steps_by_state([*map(strip_images, (one, two, elsewhere, blind))]).values()) == found


def test_anchor_advantages_equal_those_of_the_definition() -> None:
    for group, divide in product(varied_groups(3), (True, False)):
        members = [t for t in group.trajectories if t.trainable]
        found = anchor_advantages(members, 0.9, divide)
        compared = 0
        steps = [(i, k, t, step) for i, t in enumerate(members) for k, step in enumerate(t.steps)]
        for i, k, own, acted in steps:
            alike = [
                t.reward * 0.9 ** (len(t.steps) - 1 - number)
                for _, number, t, step in steps
                if step.url == acted.url and t.images[step.images[-1]] == own.images[acted.images[-1]]
            ]
            compared += len(alike) > 1
            value = own.reward * 0.9 ** (len(own.steps) - 1 - k)
            scale = float(np.std(alike)) + 1e-6 if divide else 1.0
            wanted = (value - sum(alike) / len(alike)) / scale
            assert found[i][k] == pytest.approx(wanted, abs=1e-9), (group.ticket, divide, i, k)
        assert compared > 2


def test_they_are_added_with_their_weight_to_those_of_the_episodes() -> None:
    groups, config = varied_groups(4), Config()
    for scale in ("group_std", "none"):
        config.trainer.advantage = advantage_config(scale=scale)
        plain = step_advantages(groups, config)
        config.trainer.advantage = advantage_config(scale=scale, anchor_weight=0.7)
        found = step_advantages(groups, config)
        for group, values, without in zip(groups[:-1], found, plain, strict=False):
            members = [t for t in group.trajectories if t.trainable]
            for t, anchor in zip(
                members, anchor_advantages(members, ANCHOR_DISCOUNT, scale == "group_std"), strict=True
            ):
                np.testing.assert_allclose(values[t.index], without[t.index] + 0.7 * anchor, rtol=1e-12)
        assert all(not value.any() for value in found[-1].values())  # a group of failures alone


def test_successes_alone_are_not_compared_by_their_lengths() -> None:
    members = visits(0, "abc", success=True), visits(1, "ab", success=True)
    assert any(value.any() for value in anchor_advantages(members, 0.95, divide=True))
    config = Config()
    config.trainer.advantage.anchor_weight = 1.0
    (found,) = step_advantages([Group(0, members)], config)
    assert not any(value.any() for value in found.values())


def test_metrics_count_the_steps_that_share_a_state() -> None:
    group = Group(0, (visits(0, "abc", success=True), visits(1, "ab", success=False), trajectory(0, 2, outcome="x")))
    settings = advantage_config(anchor_weight=1.0)
    assert credit_metrics([group], settings) == {"anchored_step_rate": pytest.approx(4 / 5)}
    assert credit_metrics([group], advantage_config()) == {}
