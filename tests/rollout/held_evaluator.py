"""An evaluator whose verdicts wait for the test."""

from __future__ import annotations

import asyncio

from megatron_webrl.judge.evaluation import page_verdict
from megatron_webrl.types import Trajectory, Verdict


class HeldEvaluator:
    """Gives verdicts by the page once the test permits them, or raises its `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.permitted, self.waiting, self.error = asyncio.Event(), 0, error

    async def evaluate(self, trajectory: Trajectory) -> Verdict:
        self.waiting += 1
        await self.permitted.wait()
        if self.error is not None:
            raise self.error
        return page_verdict(trajectory)
