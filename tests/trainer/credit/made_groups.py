"""Groups with everything that credit assignment looks at, generated from a seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megatron_webrl.types import Action, Group, Step, Trajectory
from tests.trajectories import trajectory

ACTIONS = (Action("left_click", (1, 2)), Action("left_click", (3, 4)), None)
SCREENSHOTS = (b"first page", b"second page", b"third page")
URLS = ("http://shop.localhost/", "http://shop.localhost/cart")
LIMIT, WINDOW = 40, 20  # tokens: rollout.max_new_tokens, trainer.reward.length_window


def varied_episode(rng: np.random.Generator, ticket: int, index: int, success: bool, steps: int) -> Trajectory:
    """An episode of pages, format errors, repetitions and response lengths drawn at random."""
    made = trajectory(ticket, index, reward=float(success), steps=steps)
    shown = [int(rng.integers(len(SCREENSHOTS))) for _ in range(steps)]
    varied = tuple(_step(rng, step, shown[: number + 1]) for number, step in enumerate(made.steps))
    end = "steps_exhausted" if not success and rng.random() < 0.4 else "done"
    return replace(made, steps=varied, images=SCREENSHOTS, end_reason=end)


def _step(rng: np.random.Generator, step: Step, shown: list[int]) -> Step:
    length, action = int(rng.integers(1, LIMIT + 1)), ACTIONS[rng.integers(len(ACTIONS))]
    return replace(
        step, action=action, format_error="no_json" if action is None else None, url=URLS[rng.integers(len(URLS))],
        page_changed=bool(rng.integers(2)), finish_reason="length" if length == LIMIT else "stop",
        response_token_ids=np.zeros(length, np.int32), logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32), images=np.array(shown, np.int32),
        image_grids=np.ones((len(shown), 3), np.int32),
    )  # fmt: skip


def varied_groups(seed: int, groups: int = 4, size: int = 5) -> list[Group]:
    """Groups of mixed outcomes, the last one of failures alone; each has a masked episode."""
    rng = np.random.default_rng(seed)
    made = []
    for ticket in range(groups):
        outcomes = rng.permutation([True, False, *(rng.random(size - 2) < 0.5)]) if ticket < groups - 1 else [False] * 3
        members = [varied_episode(rng, ticket, i, bool(s), int(rng.integers(1, 7))) for i, s in enumerate(outcomes)]
        masked = trajectory(ticket, len(members), outcome="browser_error")
        made.append(Group(ticket, (*members, masked)))
    return made


def plain_group(outcomes: list[bool], lengths: list[int], ticket: int = 0) -> Group:
    return Group(
        ticket,
        tuple(
            trajectory(ticket, i, reward=float(success), steps=steps)
            for i, (success, steps) in enumerate(zip(outcomes, lengths, strict=True))
        ),
    )
