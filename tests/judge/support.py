"""Episodes, settings and oracles for tests of the judge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from aiohttp import web

from megatron_webrl.config.judge import BudgetConfig, JudgeConfig, JudgeModelConfig, judge_config
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import EpisodeEvaluator, open_evaluator
from megatron_webrl.types import ANSWER, STEPS_EXHAUSTED, Action, RubricFact, Task, Trajectory
from tests.trajectories import screenshot, trajectory
from tools.judge_endpoint.server import Endpoint, EndpointOptions, serve_endpoint

KEY_VARIABLE = "WEBRL_TEST_JUDGE_KEY"
FACTS = (RubricFact("1", "Price of the lamp", "12 euros"), RubricFact("2", "Colour of the lamp", "blue"))
ANSWER_TEXT = "The lamp costs 12 euros and is blue."


def episode(
    answer: str | None = ANSWER_TEXT, *, shots: int = 3, reference: str | None = "12 euros",
    facts: tuple[RubricFact, ...] = FACTS, instruction: str = "Find price and colour of the lamp.",
    end_reason: str | None = None, page_reward: float | None = None, ticket: int = 0, title: str = "Shop",
    url: str = "http://shop.localhost/lamp", images: tuple[bytes, ...] | None = None, actions: tuple[Action, ...] = (),
) -> Trajectory:  # fmt: skip
    """An unjudged episode of a web task, with a screenshot before each step and one after the last."""
    images = tuple(screenshot(n, 16, 16) for n in range(shots)) if images is None else images
    plain = trajectory(ticket, steps=max(1, len(images) - 1))
    last = Action("answer", text=answer) if answer is not None else Action("wait", time=1.0)
    chosen = [*actions, *[Action("left_click", coordinate=(5, 5))] * len(plain.steps)][: len(plain.steps) - 1]
    steps = tuple(
        replace(step, **_shown(n if images else None), action=action, title=title, url=url)
        for n, (step, action) in enumerate(zip(plain.steps, [*chosen, last], strict=True))
    )
    return replace(
        plain,
        task=Task("web/1", "web", "shopping", 0, 10, answer=reference, facts=facts, url=url, website="shop.localhost"),
        instruction=instruction, steps=steps, images=images, page_reward=page_reward, outcome="failure",
        end_reason=end_reason or (ANSWER if answer is not None else STEPS_EXHAUSTED),
    )  # fmt: skip


def _shown(image: int | None) -> dict[str, np.ndarray]:
    count = 0 if image is None else 1
    return {"images": np.full(count, image or 0, np.int32), "image_grids": np.ones((count, 3), np.int32)}


@dataclass
class ScriptedOracle:
    """Answers by stage, yes where nothing is given and no for blocked; keeps what it was asked."""

    answers: dict[str, bool | Callable[[dict[str, str], list[bytes]], bool]] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, str], list[bytes]]] = field(default_factory=list)

    def decide(self, stage: str, fields: dict[str, str], images: list[bytes]) -> bool:
        self.asked.append((stage, fields, images))
        found = self.answers.get(stage, stage != "blocked")
        return found if isinstance(found, bool) else found(fields, images)

    @property
    def stages(self) -> list[str]:
        return [stage for stage, _, _ in self.asked]


def settings(url: str, **chosen: Any) -> JudgeConfig:
    values: dict[str, Any] = {
        "evaluators": ["judge"], "verdict": JudgeModelConfig("oracle", url, "", 1.0, 2.0), "timeout_seconds": 20.0,
        "deadline_seconds": 120.0,
    }  # fmt: skip
    return judge_config(**{**values, **chosen})


@asynccontextmanager
async def endpoint_of(oracle: Any, **options: Any) -> AsyncIterator[tuple[str, Endpoint]]:
    async with serve_endpoint(EndpointOptions(oracle, **options)) as served:
        yield served


@asynccontextmanager
async def serving(handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def judging(
    oracle: Any, chosen: dict[str, Any] | None = None, meter: LocalMeter | None = None, **options: Any
) -> AsyncIterator[tuple[EpisodeEvaluator, Endpoint]]:
    """An evaluator at an endpoint of this process. `chosen`: settings of JudgeConfig; `options`: of the endpoint."""
    async with (
        endpoint_of(oracle, **options) as (url, endpoint),
        open_evaluator(settings(url, **(chosen or {})), meter or LocalMeter(BudgetConfig())) as evaluator,
    ):
        yield evaluator, endpoint
