from __future__ import annotations

import pytest

from megatron_webrl.trainer import batching
from megatron_webrl.types import Group
from tests.trajectories import trajectory


def groups() -> list[Group]:
    return [
        Group(
            0,
            (
                trajectory(0, 0, reward=1.0, steps=2),
                trajectory(0, 1, steps=3),
                trajectory(0, 2, outcome="browser_error"),
            ),
        ),
        Group(1, (trajectory(1, 0, reward=1.0), trajectory(1, 1, steps=4))),
    ]


def test_samples_are_the_steps_of_trainable_trajectories():
    samples = batching.samples_of(groups())
    assert [s.trajectory for s in samples] == [(0, 0)] * 2 + [(0, 1)] * 3 + [(1, 0)] + [(1, 1)] * 4
    assert all((s.advantage > 0) == (s.trajectory[1] == 0) for s in samples)


def test_imitation_takes_successes_only():
    samples = batching.samples_of(groups(), batching.imitation)
    assert {s.trajectory for s in samples} == {(0, 0), (1, 0)}
    assert {s.advantage for s in samples} == {1.0}


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_minibatches_keep_trajectories_whole(count: int):
    samples = batching.samples_of(groups())
    parts = batching.minibatches(samples, count, seed=3)
    assert len(parts) == min(count, 4)
    seen = [{s.trajectory for s in part} for part in parts]
    assert sum(map(len, seen)) == len(set().union(*seen)) == 4
    assert sum(map(len, parts)) == len(samples)


@pytest.mark.parametrize(
    ("normaliser", "total"), [("constant", 10 * 3 / (4 * 10)), ("per_trajectory", 3.0), ("token_mean", 1.0)]
)
def test_token_weights_add_up(normaliser: str, total: float):
    samples = batching.samples_of(groups())
    values = batching.weights(samples, normaliser, k=10)
    assert sum(w * len(s.response) for w, s in zip(values, samples, strict=True)) == pytest.approx(total)
