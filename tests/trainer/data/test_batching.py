from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.trainer.data import batching
from megatron_webrl.types import Group
from tests.trajectories import trajectory


def groups() -> list[Group]:
    masked = trajectory(0, 2, outcome="browser_error")
    return [
        Group(0, (trajectory(0, 0, reward=1.0, steps=2), trajectory(0, 1, steps=3), masked)),
        Group(1, (trajectory(1, 0, reward=1.0), trajectory(1, 1, steps=4))),
    ]


def test_samples_are_the_steps_of_trainable_trajectories():
    samples = batching.make_samples(groups())
    assert [s.trajectory_id for s in samples] == [(0, 0)] * 2 + [(0, 1)] * 3 + [(1, 0)] + [(1, 1)] * 4
    assert all((s.advantage > 0) == (s.trajectory_id[1] == 0) for s in samples)


def test_imitation_takes_successes_and_a_warm_start_failures_too_but_no_masked_episode():
    paid_in_part = Group(2, (trajectory(2, 0, reward=0.5, outcome="failure"),))
    successes = batching.make_samples([*groups(), paid_in_part], batching.success_advantages)
    assert {s.trajectory_id for s in successes} == {(0, 0), (1, 0)}
    assert {s.advantage for s in successes} == {1.0}
    found = {s.trajectory_id for s in batching.make_samples(groups(), batching.demonstration_advantages)}
    assert found == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_imitation_may_skip_steps_that_left_the_page_unchanged_but_for_the_last_step():
    changed = {(0, 0): [True, False, True, False], (0, 1): [False, False], (1, 0): [False]}
    made = [trajectory(*key, reward=float(key != (0, 1)), steps=len(pages)) for key, pages in changed.items()]
    episodes = [
        replace(t, steps=tuple(replace(s, page_changed=p) for s, p in zip(t.steps, pages, strict=True)))
        for t, pages in zip(made, changed.values(), strict=True)
    ]
    config = Config()
    config.trainer.loss = loss_config("raft", normalizer="per_trajectory", unchanged_pages="skip")
    samples = batching.training_samples([Group(0, tuple(episodes[:2])), Group(1, (episodes[2],))], config, 0)
    assert [s.step_id for s in samples] == [(0, 0, 0), (0, 0, 2), (0, 0, 3), (1, 0, 0)]
    # |tau| is that of the whole episode.
    assert batching.token_weights(samples, "per_trajectory", 10) == pytest.approx([1 / (2 * 4)] * 3 + [1 / 2])
    config.trainer.loss.unchanged_pages = "keep"
    assert len(batching.training_samples([Group(0, tuple(episodes[:2]))], config, 0)) == 4


def test_minibatches_keep_groups_or_trajectories_whole():
    more = [Group(ticket, (trajectory(ticket, 0), trajectory(ticket, 1, reward=1.0))) for ticket in (2, 3)]
    samples = batching.make_samples([*groups(), *more])
    for count, whole_groups in product((1, 2, 3, 9), (True, False)):
        units = {s.trajectory_id[: 1 if whole_groups else 2] for s in samples}
        assert len(units) == (4 if whole_groups else 8)
        parts = batching.minibatches(samples, count, 3, whole_groups)
        assert len(parts) == min(count, len(units)), (count, whole_groups)
        seen = [{s.trajectory_id[: 1 if whole_groups else 2] for s in part} for part in parts]
        assert sum(map(len, seen)) == len(set().union(*seen)) == len(units), (count, whole_groups)
        assert sum(map(len, parts)) == len(samples), (count, whole_groups)


def test_tokens_are_weighed_by_the_equations_of_each_minibatch():
    steps = {(0, 0): 2, (0, 1): 3, (1, 0): 1, (1, 1): 4}
    for count in (1, 2):
        for part in batching.minibatches(batching.make_samples(groups()), count, seed=3):
            n, tokens = len({s.trajectory_id for s in part}), sum(len(s.response) for s in part)
            lengths = [steps[s.trajectory_id] for s in part]
            for normalizer, wanted in {
                "constant": [1 / (n * 7) for _ in lengths],
                "per_trajectory": [1 / (n * length) for length in lengths],
                "token_mean": [1 / tokens for _ in lengths],
                "async_webrl_constant": [1 / (7 * tokens) for _ in lengths],
                "async_webrl_per_trajectory": [1 / (length * tokens) for length in lengths],
            }.items():
                assert batching.token_weights(part, normalizer, 7) == pytest.approx(wanted), (normalizer, count)
    with pytest.raises(ValueError, match="'sum' is not one of constant, "):
        batching.token_weight("sum", 4, 200, steps=1, constant_steps=1)


def test_failures_of_equal_advantage_are_pushed_by_their_length_per_trajectory_only():
    """Exact: the gradient of the logit of ending an episode, over all failures by their probability."""
    ends, horizon, pushes = 0.3, 16, {}
    for normalizer in ("constant", "per_trajectory"):
        pushes[normalizer] = 0.0
        for length, ended in (*((length, 1) for length in range(1, horizon + 1)), (horizon, 0)):
            probability = (1 - ends) ** (length - ended) * ends**ended
            weight = batching.token_weight(normalizer, 1, horizon, length, 8)
            pushes[normalizer] -= probability * weight * (ended - length * ends)  # advantage -1
    assert pushes["constant"] == pytest.approx(0.0, abs=1e-12)
    assert pushes["per_trajectory"] < -0.05  # ending becomes less likely


def test_the_loss_selects_the_samples_and_advantages_of_an_update():
    config = Config()
    plain = [(s.trajectory_id, s.advantage) for s in batching.make_samples(groups())]
    assert [(s.trajectory_id, s.advantage) for s in batching.training_samples(groups(), config, 3)] == plain
    for name in ("raft", "raft_plus_plus"):
        config.trainer.loss = loss_config(name)
        assert {s.advantage for s in batching.training_samples(groups(), config, 3)} == {1.0}
    config.trainer.loss = loss_config()
    config.trainer.distillation = DistillationConfig(coefficient=1.0, rewards=False)
    alone = batching.training_samples(groups(), config, 3)
    assert {s.trajectory_id for s in alone} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert not any(s.advantage for s in alone)


def test_shuffled_rewards_are_a_permutation_among_trainable_trajectories():
    config = Config()
    config.trainer.loss = loss_config("raft")
    many = [Group(t, tuple(trajectory(t, i, reward=float(i <= t % 3)) for i in range(4))) for t in range(9)]
    masked = replace(many[0].trajectories[0], outcome="engine_error", reward=0.0)
    many[0] = replace(many[0], trajectories=(masked, *many[0].trajectories[1:]))
    assert batching.shuffled_rewards(many, config, 0) == many
    config.trainer.loss.shuffle_advantages = True

    def rewards(groups: list[Group]) -> list[float]:
        return [t.reward for group in groups for t in group.trajectories]

    dealt = [batching.shuffled_rewards(many, config, version) for version in (0, 0, 1)]
    assert rewards(dealt[0]) == rewards(dealt[1]) != rewards(dealt[2])
    assert rewards(dealt[0]) != rewards(many)
    for groups in dealt:
        assert sorted(rewards(groups)) == sorted(rewards(many))
        assert groups[0].trajectories[0] == masked
        imitated = {s.trajectory_id for s in batching.training_samples(groups, config, 0)}
        assert imitated == {(t.ticket, t.index) for g in groups for t in g.trajectories if t.reward}
