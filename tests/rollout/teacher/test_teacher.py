"""Faults of a teacher's server: what is repeated, what masks an episode, what ends a worker at its start."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout import teacher as module
from megatron_webrl.rollout.teacher import Teacher
from megatron_webrl.types import Trajectory
from tests.judge.support import serving
from tests.trajectories import trajectory

KEY = "WEBRL_TEST_TEACHER_KEY"
Handler = Callable[[web.Request], Awaitable[web.Response]]


def reply(body: dict[str, Any], **changes: Any) -> web.Response:
    """vLLM's reply to a request, with the log-probability -number of each token."""
    tokens = body["token_ids"]
    rows = [None, *({str(t): {"logprob": -float(n)}} for n, t in enumerate(tokens[1:], 1))]
    return web.json_response({"prompt_token_ids": tokens, "prompt_logprobs": rows} | changes)


@asynccontextmanager
async def teacher(url: str, processor: Processor, seconds: float = 20.0) -> AsyncIterator[Teacher]:
    """A teacher whose server has not been checked."""
    async with Teacher(DistillationConfig(coefficient=1.0, url=url), processor, seconds) as made:
        yield made


async def scored(handle: Handler, processor: Processor, episode: Trajectory, seconds: float = 20.0) -> Trajectory:
    async with serving(handle) as url, teacher(url, processor, seconds) as scorer:
        return await scorer.scored(episode)


async def test_faults_that_may_pass_are_repeated(processor: Processor) -> None:
    faults = [503, 429]

    async def handle(request: web.Request) -> web.Response:
        assert request.path == "/inference/v1/generate"
        return web.Response(status=faults.pop()) if faults else reply(await request.json())

    episode = trajectory(reward=1.0, steps=2, prompt=5, response=3)
    found = await scored(handle, processor, episode)
    assert found.outcome == "success"
    for step, before in zip(found.steps, episode.steps, strict=True):
        assert step.teacher_logprobs.dtype == np.float32
        assert step.teacher_logprobs.tolist() == [-5.0, -6.0, -7.0]
        assert step.response_token_ids is before.response_token_ids


async def test_unusable_replies_and_hangs_mask_episodes(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    for changes, words in (
        ({"prompt_token_ids": [1, 2]}, "it read 2 tokens with images of"),
        *(({name: value}, "its reply has no log-probabilities") for name, value in (
            ("prompt_logprobs", None), ("prompt_logprobs", [None] * 8), ("prompt_token_ids", None),
        )),
        ({"prompt_logprobs": [None] * 5 + [{str(t): {"logprob": float("nan")} for t in range(300)}] * 3}, "not finite"),
        ("refuse", "it refused /inference/v1/generate with status 400: too many tokens"),
        ("hang", "0 of 1 steps are scored after 0.3 s"),
    ):  # fmt: skip

        async def handle(request: web.Request, changes: Any = changes) -> web.Response:
            if changes == "refuse":
                return web.Response(text="too many tokens", status=400)
            if changes == "hang":
                await asyncio.sleep(20)
            return reply(await request.json(), **changes)

        seconds = 0.3 if changes == "hang" else 20.0
        found = await scored(handle, processor, trajectory(reward=1.0), seconds)
        assert (found.outcome, found.reward, found.trainable) == ("teacher_error", 0.0, False)
        assert words in caplog.text
        caplog.clear()


async def test_what_needs_no_score_or_can_have_none_is_left_out(processor: Processor) -> None:
    async def handle(request: web.Request) -> web.Response:
        return reply(await request.json())

    masked = trajectory(outcome="judge_error")
    assert await scored(handle, processor, masked) is masked
    plain = trajectory(steps=2)
    response = plain.steps[1].response_token_ids.copy()
    response[1] = processor.image_token_id
    episode = replace(plain, steps=(plain.steps[0], replace(plain.steps[1], response_token_ids=response)))
    found = await scored(handle, processor, episode)
    assert np.isfinite(found.steps[0].teacher_logprobs).all()
    assert np.isnan(found.steps[1].teacher_logprobs).tolist() == [True] * 3


async def opened(handle: Handler, model: Path, **chosen: Any) -> str:
    config = Config()
    async with serving(handle) as url:
        config.trainer.distillation = DistillationConfig(**{"coefficient": 1.0, "url": url, **chosen})
        with pytest.raises(ConfigError) as caught:
            async with Teacher.open(config, Processor.load(model)):
                pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_a_silent_server_or_another_one_is_one_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in ("<html>", "[]", '{"data": []}', '{"data": [{"id": "m"}]}', None):

        async def handle(request: web.Request, answer: str | None = answer) -> web.Response:
            return web.Response(text=answer) if answer is not None else web.Response(status=502)

        monkeypatch.setattr(module, "TIMEOUT_SECONDS", 20.0 if answer is not None else 1.0)
        message = await opened(handle, tiny_model)
        not_vllm = "does not answer as a vLLM server does"
        assert ("within 1 s (trainer.distillation.url): status 502" if answer is None else not_vllm) in message


async def test_the_key_of_the_server_is_sent(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(request: web.Request) -> web.Response:
        right = request.headers["Authorization"] == "Bearer right"
        return web.json_response({"data": [{"max_model_len": 16384}]}) if right else web.Response(status=401)

    for key, words in (
        (None, f"{KEY} is not set (trainer.distillation.key_variable)"),
        ("wrong", "it refused /v1/models with status 401"),
        ("right", "max_model_len=16384 must exceed rollout.max_model_len=16384"),
    ):
        if key is not None:
            monkeypatch.setenv(KEY, key)
        assert words in await opened(handle, tiny_model, key_variable=KEY)
