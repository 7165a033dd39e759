"""Small complete trajectories for tests, generated from a seed."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from megatron_webrl.types import Action, Step, Task, Trajectory


def screenshot(seed: int, width: int = 64, height: int = 64) -> bytes:
    """A PNG image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def trajectory(
    ticket: int = 0,
    index: int = 0,
    *,
    reward: float = 0.0,
    outcome: str | None = None,
    version: int = 0,
    steps: int = 1,
    group_size: int = 2,
    restart_epoch: int = 0,
    prompt: int = 5,
    response: int = 3,
    seed: int = 0,
    worker: str = "rollout-0.1",
) -> Trajectory:
    """A trajectory without images whose tokens are all of `version`."""
    rng = np.random.default_rng((seed, ticket, index))
    return Trajectory(
        ticket=ticket,
        index=index,
        group_size=group_size,
        restart_epoch=restart_epoch,
        task=Task(f"miniwob/click-test/{ticket}", "miniwob", "click-test", ticket, 5),
        instruction="Click the button.",
        steps=tuple(_step(rng, version, prompt, response) for _ in range(steps)),
        images=(),
        reward=reward,
        outcome=outcome or ("success" if reward > 0 else "failure"),
        temperature=1.0,
        seconds=1.0,
        finished_at=100.0 + ticket,
        worker=worker,
    )


def _step(rng: np.random.Generator, version: int, prompt: int, response: int) -> Step:
    return Step(
        prompt_token_ids=rng.integers(0, 300, prompt).astype(np.int32),
        response_token_ids=rng.integers(0, 300, response).astype(np.int32),
        logprobs=-rng.random(response).astype(np.float32),
        versions=np.full(response, version, np.int32),
        images=np.zeros(0, np.int32),
        image_grids=np.zeros((0, 3), np.int32),
        finish_reason="stop",
        action=Action("left_click", (500, 500)),
    )
