"""Score the responses of finished episodes with the teacher."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
from PIL import Image

from megatron_webrl.config.schema import Config
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.teacher.server import TeacherError, TeacherServer
from megatron_webrl.types import TEACHER_ERROR, Step, Trajectory

log = logging.getLogger(__name__)


class Teacher:
    """Adds the teacher's log-probabilities to the steps of an episode."""

    def __init__(self, server: TeacherServer, processor: Processor, timeout_seconds: float) -> None:
        self._server, self._processor, self._seconds = server, processor, timeout_seconds

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config, processor: Processor) -> AsyncIterator[Teacher]:
        """The teacher of trainer.distillation. Raises ConfigError unless its server answers and fits the policy."""
        settings, browser = config.trainer.distillation, config.browser
        async with TeacherServer(settings, processor) as server:
            await server.check(config.rollout.max_model_len, _blank(browser.width, browser.height))
            yield cls(server, processor, settings.timeout_seconds)

    async def scored(self, trajectory: Trajectory) -> Trajectory:
        """The trajectory with Step.teacher_logprobs; masked as teacher_error if the teacher fails or takes too long.

        Episodes that are masked already are returned as they are.
        """
        if not trajectory.trainable:
            return trajectory
        steps: list[Step] = []
        try:
            async with asyncio.timeout(self._seconds) as limit:
                for step in trajectory.steps:
                    steps.append(replace(step, teacher_logprobs=await self._score(trajectory, step)))
        except TeacherError as error:
            return self._masked(trajectory, str(error))
        except TimeoutError:
            if not limit.expired():
                raise
            limit_name = "trainer.distillation.timeout_seconds"
            return self._masked(
                trajectory,
                f"{len(steps)} of {len(trajectory.steps)} steps are scored after {self._seconds:g} s ({limit_name})",
            )
        return replace(trajectory, steps=tuple(steps))

    async def _score(self, trajectory: Trajectory, step: Step) -> np.ndarray:
        """float32 [response]; NaN for a response with a placeholder, text that the server would take for an image."""
        response = step.response_token_ids
        if np.isin(response, self._processor.placeholder_token_ids).any():
            return np.full(len(response), np.nan, np.float32)
        images = [trajectory.images[index] for index in step.images]
        return await self._server.score(step.prompt_token_ids, response, images)

    def _masked(self, trajectory: Trajectory, reason: str) -> Trajectory:
        log.warning(
            "episode %d of ticket %d is masked as %s: the teacher %s: %s",
            trajectory.index, trajectory.ticket, TEACHER_ERROR, self._server.url, reason,
        )  # fmt: skip
        return replace(trajectory, outcome=TEACHER_ERROR, reward=0.0)


def _blank(width: int, height: int) -> bytes:
    """A white screenshot, PNG."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(buffer, "PNG")
    return buffer.getvalue()
