"""Faults of a teacher's server: what is repeated, what masks an episode, what ends a worker at its start."""

from __future__ import annotations

import asyncio
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
from megatron_webrl.rollout.teacher import Teacher
from megatron_webrl.types import Trajectory
from tests.rollout.teacher.servers import Handler, reply, serving, teacher
from tests.trajectories import trajectory

KEY = "WEBRL_TEST_TEACHER_KEY"


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


async def scored(handle: Handler, processor: Processor, episode: Trajectory, seconds: float = 20.0) -> Trajectory:
    async with serving(handle) as url, teacher(url, processor, seconds) as scorer:
        return await scorer.scored(episode)


async def test_faults_that_may_pass_are_repeated(processor: Processor) -> None:
    faults = [503, 429, 500]

    async def handle(request: web.Request) -> web.Response:
        assert request.path == "/inference/v1/generate"
        if faults:
            return web.Response(status=faults.pop())
        return reply(await request.json())

    episode = trajectory(reward=1.0, steps=2, prompt=5, response=3)
    found = await scored(handle, processor, episode)
    assert found.outcome == "success"
    for step, before in zip(found.steps, episode.steps, strict=True):
        assert step.teacher_logprobs.dtype == np.float32
        assert step.teacher_logprobs.tolist() == [-5.0, -6.0, -7.0]
        assert step.response_token_ids is before.response_token_ids


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_token_ids": [1, 2]}, "it read 2 tokens with images of"),
        ({"prompt_logprobs": None}, "its reply has no log-probabilities"),
        ({"prompt_logprobs": [None] * 8}, "its reply has no log-probabilities"),
        ({"prompt_token_ids": None}, "its reply has no log-probabilities"),
    ],
)
async def test_an_unusable_reply_masks_the_episode(
    processor: Processor, changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: web.Request) -> web.Response:
        return reply(await request.json(), **changes)

    found = await scored(handle, processor, trajectory(reward=1.0))
    assert (found.outcome, found.reward, found.trainable) == ("teacher_error", 0.0, False)
    assert reason in caplog.text


async def test_a_refusal_masks_the_episode_at_once(processor: Processor, caplog: pytest.LogCaptureFixture) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.json_response({"error": "too many tokens"}, status=400)

    assert (await scored(handle, processor, trajectory())).outcome == "teacher_error"
    assert "it refused /inference/v1/generate with status 400" in caplog.text
    assert "too many tokens" in caplog.text


async def test_a_server_that_hangs_masks_the_episode_at_the_limit(processor: Processor) -> None:
    async def handle(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    assert (await scored(handle, processor, trajectory(), seconds=0.3)).outcome == "teacher_error"


async def test_episodes_that_are_masked_already_are_not_scored(processor: Processor) -> None:
    async def handle(request: web.Request) -> web.Response:
        raise AssertionError

    masked = trajectory(outcome="judge_error")
    assert await scored(handle, processor, masked) is masked


async def test_a_response_with_a_placeholder_has_no_teacher(processor: Processor) -> None:
    async def handle(request: web.Request) -> web.Response:
        return reply(await request.json())

    plain = trajectory(steps=2)
    response = plain.steps[1].response_token_ids.copy()
    response[1] = processor.image_token_id
    episode = replace(plain, steps=(plain.steps[0], replace(plain.steps[1], response_token_ids=response)))
    found = await scored(handle, processor, episode)
    assert np.isfinite(found.steps[0].teacher_logprobs).all()
    assert np.isnan(found.steps[1].teacher_logprobs).all()
    assert found.steps[1].teacher_logprobs.shape == (3,)


async def opened(handle: Handler, model: Path, **chosen: Any) -> str:
    """The error of opening a teacher."""
    config = Config()
    async with serving(handle) as url:
        config.trainer.distillation = DistillationConfig(**{"coefficient": 1.0, "url": url, **chosen})
        with pytest.raises(ConfigError) as caught:
            async with Teacher.open(config, Processor.load(model)):
                pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


async def test_a_server_that_never_answers_is_one_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(status=502)

    monkeypatch.setattr("megatron_webrl.rollout.teacher.TIMEOUT_SECONDS", 3.0)
    message = await opened(handle, tiny_model)
    assert "did not answer within 3 s (trainer.distillation.url): status 502" in message


@pytest.mark.parametrize("answer", ["<html>", "[]", '{"data": []}', '{"data": [{"id": "m"}]}'])
async def test_another_server_than_vllm_is_one_error(tiny_model: Path, answer: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    assert "does not answer as a vLLM server does" in await opened(handle, tiny_model)


async def test_the_key_of_the_server_is_sent(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(request: web.Request) -> web.Response:
        right = request.headers["Authorization"] == "Bearer right"
        return web.json_response({"data": [{"max_model_len": 5}]}) if right else web.Response(status=401)

    assert f"{KEY} is not set (trainer.distillation.key_variable)" in await opened(handle, tiny_model, key_variable=KEY)
    monkeypatch.setenv(KEY, "wrong")
    assert "it refused /v1/models with status 401" in await opened(handle, tiny_model, key_variable=KEY)
    monkeypatch.setenv(KEY, "right")
    message = await opened(handle, tiny_model, key_variable=KEY)
    assert "max_model_len=5 must exceed rollout.max_model_len=16384" in message
