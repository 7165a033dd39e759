"""What the loss normaliser does to the length of failures, with a tabular agent and the project's own loss functions.

Half of the pages take WORK steps of work, after which submitting succeeds; on the others nothing helps, which the agent
can tell. At each step the agent works, stalls or submits; its policy is a table of
logits by state. An episode that reaches the horizon is a failure. Since E[f grad log p] = grad E[f], a weight 1/|tau|
on failures of equal advantage A < 0 ascends E[A/|tau|]: it makes failures longer where the agent chooses when to end. A
constant weight leaves their length alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pytest
import torch

from megatron_webrl.config.loss import loss_config
from megatron_webrl.trainer.credit.advantages import normalize
from megatron_webrl.trainer.data.batching import token_weight
from megatron_webrl.trainer.loss.objective import make_objective
from megatron_webrl.trainer.loss.token_data import TokenData

WORK, HORIZON = 3, 16
STUCK = WORK + 1  # the state of a page on which nothing helps
WORKS, DITHERS, SUBMITS = range(3)
GROUPS, GROUP_SIZE, UPDATES, LAST, LEARNING_RATE = 4, 8, 40, 15, 0.05
SEEDS = range(3)
START = np.log([[0.8, 0.1, 0.1]] * WORK + [[0.1, 0.6, 0.3], [0.1, 0.6, 0.3]])  # [states, actions]


@dataclass(frozen=True)
class Episode:
    """One episode; every step is one token."""

    states: tuple[int, ...]  # before each step: work done, or STUCK
    actions: tuple[int, ...]
    success: bool


@dataclass(frozen=True)
class Outcome:
    """Means over the last updates."""

    success: float
    failure_steps: float


def play(policy: np.ndarray, may_end: bool, rng: np.random.Generator) -> Episode:
    """One episode of `policy`, probabilities [states, actions]; without `may_end` a submit that fails does nothing."""
    states, actions, state = list[int](), list[int](), STUCK if rng.random() < 0.5 else 0
    while len(states) < HORIZON:
        states.append(state)
        actions.append(int(np.searchsorted(np.cumsum(policy[state])[:-1], rng.random(), side="right")))
        if actions[-1] == SUBMITS and (may_end or state == WORK):
            return Episode(tuple(states), tuple(actions), state == WORK)
        if actions[-1] == WORKS and state < WORK:
            state += 1
    return Episode(tuple(states), tuple(actions), False)


def loss_of(logits: torch.Tensor, groups: Sequence[Sequence[Episode]], normalizer: str, k: int) -> torch.Tensor:
    """The configured GRPO loss of groups without those of one outcome, at the policy that played them."""
    mixed = [group for group in groups if len({episode.success for episode in group}) == 2]
    episodes = [episode for group in mixed for episode in group]
    advantages = np.concatenate(
        [value for group in mixed for value in normalize([np.array([float(episode.success)]) for episode in group])]
    )
    lengths = [len(episode.actions) for episode in episodes]
    totals = (len(episodes), sum(lengths))
    weights = [token_weight(normalizer, *totals, length, k) for length in lengths]
    states, actions = (
        torch.tensor([value for episode in episodes for value in getattr(episode, name)])
        for name in ("states", "actions")
    )
    current = torch.log_softmax(logits, 1)[states, actions]
    before = current.detach()
    data = TokenData(
        behaviour_logprobs=before, proximal_logprobs=before,
        advantage=torch.tensor(np.repeat(advantages, lengths)), weight=torch.tensor(np.repeat(weights, lengths)),
        step_index=torch.arange(len(states)), step_lengths=torch.ones(len(states), dtype=torch.float64),
        versions=torch.zeros(len(states)),
    )  # fmt: skip
    return make_objective(loss_config(), None)(current, data)[0]


def train(normalizer: str, seed: int, may_end: bool) -> Outcome:
    """Train an agent; k is the mean length of the first batch."""
    rng, k = np.random.default_rng(seed), 0
    logits = torch.tensor(START, requires_grad=True)
    optimizer = torch.optim.Adam([logits], LEARNING_RATE)
    late: list[Episode] = []
    for update in range(UPDATES):
        policy = torch.softmax(logits.detach(), 1).numpy()
        groups = [[play(policy, may_end, rng) for _ in range(GROUP_SIZE)] for _ in range(GROUPS)]
        episodes = [episode for group in groups for episode in group]
        k = k or round(fmean(len(episode.actions) for episode in episodes))
        if any(len({episode.success for episode in group}) == 2 for group in groups):
            optimizer.zero_grad()
            loss_of(logits, groups, normalizer, k).backward()
            optimizer.step()
        if update >= UPDATES - LAST:
            late += episodes
    failures = [len(episode.actions) for episode in late if not episode.success]
    return Outcome(
        success=fmean(episode.success for episode in late),
        failure_steps=fmean(failures),
    )


def test_failures_stay_longer_per_trajectory_where_the_agent_chooses_when_to_end():
    """Than with the constant; where all failures have the same length, nothing differs."""
    for seed in SEEDS:
        constant, per_trajectory = train("constant", seed, True), train("per_trajectory", seed, True)
        assert per_trajectory.failure_steps > 1.4 * constant.failure_steps, seed
        assert constant.success == pytest.approx(per_trajectory.success, abs=0.1), seed
    constant, per_trajectory = train("constant", 0, False), train("per_trajectory", 0, False)
    assert constant.failure_steps == per_trajectory.failure_steps == HORIZON
    assert constant.success == pytest.approx(per_trajectory.success, abs=0.1)
