"""Groups with the lengths of a real job and screenshots of 1280x768."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_webrl.model.processor import Processor
from megatron_webrl.placement.prediction import EpisodeLengths
from megatron_webrl.types import Action, Step, Task, Trajectory
from tools.bench.screenshots import draw_page

LENGTHS = EpisodeLengths()
WIDTH, HEIGHT, GRID = 1280, 768, (1, 48, 80)
PAGES = 12  # different drawings; every screenshot is a file of its own


def make_groups(processor: Processor, groups: int, size: int, rounds: int) -> list[list[Trajectory]]:
    """Groups of episodes with LENGTHS and a window of `rounds` screenshots; half of a group succeeds."""
    pages = [draw_page(number, WIDTH, HEIGHT) for number in range(PAGES)]
    return [
        [_episode(processor, pages, ticket, index, size, rounds) for index in range(size)] for ticket in range(groups)
    ]


def _episode(
    processor: Processor, pages: Sequence[bytes], ticket: int, index: int, size: int, rounds: int
) -> Trajectory:
    common, rng = np.random.default_rng(ticket), np.random.default_rng((ticket, index))
    header = _text(common, LENGTHS.system_tokens)
    shot = np.full(LENGTHS.screenshot_tokens, processor.image_token_id, np.int32)
    # What follows the end of a PNG is ignored, so that equal pages are different files.
    images = tuple(pages[int(rng.integers(PAGES))] + b"%d/%d/%d" % (ticket, index, step) for step in range(_steps()))
    turns = [np.concatenate([_text(rng, LENGTHS.turn_tokens), shot]) for _ in images]
    responses = [_text(rng, LENGTHS.response_tokens) for _ in images]
    steps = []
    for number, response in enumerate(responses):
        shots = np.arange(max(0, number - rounds + 1), number + 1, dtype=np.int32)
        past = [part for each in shots[:-1] for part in (turns[each], responses[each])]
        steps.append(
            Step(
                prompt_token_ids=np.concatenate([header, *past, turns[number]]),
                response_token_ids=response,
                logprobs=-rng.random(len(response)).astype(np.float32),
                versions=np.zeros(len(response), np.int32),
                images=shots,
                image_grids=np.tile(np.array(GRID, np.int32), (len(shots), 1)),
                finish_reason="stop",
                action=Action("wait"),
            )
        )
    success = index % 2
    return Trajectory(
        ticket=ticket, index=index, group_size=size, restart_epoch=0, instruction="Find the price.",
        task=Task(f"bench/{ticket}", "sites", "bench", ticket, _steps()), steps=tuple(steps), images=images,
        reward=float(success), outcome="success" if success else "failure", temperature=1.0, seconds=60.0,
        finished_at=float(ticket), worker="rollout-0.1",
    )  # fmt: skip


def _steps() -> int:
    return round(LENGTHS.steps)


def _text(rng: np.random.Generator, count: float) -> np.ndarray:
    return rng.integers(20, 300, round(count)).astype(np.int32)
