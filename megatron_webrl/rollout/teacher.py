"""The teacher of a distillation: a vLLM server that scores the tokens of the policy.

It must run with --enable-scale-out: /inference/v1/generate takes tokens together with images, unlike the endpoints of
OpenAI, which would render the text and the images of a conversation in a way of their own.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import openai

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.client import open_client
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.generator import white_image
from megatron_webrl.types import TEACHER_ERROR, Step, Trajectory
from megatron_webrl.util import network
from megatron_webrl.util.image_type import data_url
from megatron_webrl.util.text import redact, shorten

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 300.0  # of scoring one episode, retries included, and of the first contact
_PARAMETERS = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}


class TeacherError(RuntimeError):
    """The server gave no usable log-probabilities, or its model does not fit the policy's."""


class Teacher:
    """Adds the teacher's log-probabilities to the steps of episodes, many requests at once. An async context manager.

    The server's address may end with /v1, as OpenAI's clients take it. Raises ConfigError for a missing key.
    """

    def __init__(self, settings: DistillationConfig, processor: Processor, seconds: float = TIMEOUT_SECONDS) -> None:
        self.url = settings.url.rstrip("/").removesuffix("/v1")
        self._faults: list[str] = []
        key, section = settings.key_variable, "trainer.distillation"
        self._client = open_client(self.url, key, section, TIMEOUT_SECONDS, self._faults)
        self._seconds, self._processor = seconds, processor

    async def __aenter__(self) -> Teacher:
        network.use_own_threads()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.close()

    @classmethod
    @asynccontextmanager
    async def open(cls, config: Config, processor: Processor) -> AsyncIterator[Teacher]:
        """The teacher of trainer.distillation.

        Waits for a server that does not answer yet, at most TIMEOUT_SECONDS. Raises ConfigError unless its model has
        the policy's vocabulary and image sizes, and room for its sequences.
        """
        async with cls(config.trainer.distillation, processor) as teacher:
            try:
                async with asyncio.timeout(TIMEOUT_SECONDS):
                    await teacher._check(config)
            except TimeoutError:
                raise ConfigError(
                    f"the teacher {teacher.url} did not answer within {TIMEOUT_SECONDS:g} s "
                    f"(trainer.distillation.url): {shorten('; '.join(teacher._faults), 500) or 'no answer'}"
                ) from None
            except TeacherError as error:
                raise ConfigError(f"the teacher {teacher.url} cannot score this policy: {error}") from None
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"the teacher {teacher.url} does not answer as a vLLM server does: {error!r}"
                ) from None
            yield teacher

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
                    steps.append(replace(step, teacher_logprobs=await self._score_step(trajectory, step)))
        except TeacherError as error:
            reason = str(error)
        except TimeoutError:
            if not limit.expired():
                raise
            done = f"{len(steps)} of {len(trajectory.steps)} steps are scored"
            reason = f"{done} after {self._seconds:g} s"
        else:
            return replace(trajectory, steps=tuple(steps))
        log.warning(
            "episode %d of ticket %d is masked as %s: the teacher %s: %s",
            trajectory.index, trajectory.ticket, TEACHER_ERROR, self.url, reason,
        )  # fmt: skip
        return replace(trajectory, outcome=TEACHER_ERROR, reward=0.0)

    async def _check(self, config: Config) -> None:
        max_model_len, browser = config.rollout.max_model_len, config.browser
        probe = white_image(browser.width, browser.height)
        (model, *_) = json.loads(await self._request("/v1/models"))["data"]
        if model["max_model_len"] <= max_model_len:  # a request generates a token
            raise TeacherError(
                f"its max_model_len={model['max_model_len']} must exceed rollout.max_model_len={max_model_len}; start "
                f"it with --max-model-len {max_model_len + 1}"
            )
        tokens = list(range(len(self._processor.tokenizer)))
        content = await self._request("/detokenize", {"tokens": tokens})
        if json.loads(content)["prompt"] != self._processor.tokenizer.decode(tokens):
            raise TeacherError(
                "its vocabulary differs from that of model.path; serve a model of the same family and generation"
            )
        content_parts = [{"type": "image"}, {"type": "text", "text": "?"}]
        question = self._processor.encode_chat([{"role": "user", "content": content_parts}])
        prompt = self._processor.expand_image_tokens(question, self._processor.grids([probe]))
        await self._score(prompt, self._processor.encode_response("."), [probe])

    async def _score_step(self, trajectory: Trajectory, step: Step) -> np.ndarray:
        """float32 [response]; NaN for a response with a placeholder, text that the server would take for an image."""
        response = step.response_token_ids
        if np.isin(response, self._processor.placeholder_token_ids).any():
            return np.full(len(response), np.nan, np.float32)
        return await self._score(step.prompt_token_ids, response, [trajectory.images[index] for index in step.images])

    async def _score(self, prompt: np.ndarray, response: np.ndarray, images: Sequence[bytes]) -> np.ndarray:
        """Log-probabilities of a response's tokens at temperature 1, float32 [response].

        `prompt`: int32 with expanded image placeholders. Retries faults that may pass, without a limit. Raises
        TeacherError, also if the server expanded the images to other tokens.
        """
        body = await asyncio.to_thread(self._body, prompt, response, images)
        content = await self._request("/inference/v1/generate", body)
        return await asyncio.to_thread(self._logprobs, content, prompt, response)

    def _body(self, prompt: np.ndarray, response: np.ndarray, images: Sequence[bytes]) -> dict[str, Any]:
        tokens = np.concatenate([self._processor.collapse_image_tokens(prompt), response])
        parts = [{"type": "image_url", "url": data_url(image)} for image in images]
        body = {"token_ids": tokens.tolist(), "sampling_params": _PARAMETERS, "return_token_ids": True}
        return body | ({"content_parts": parts} if parts else {})

    def _logprobs(self, content: bytes, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
        try:
            reply = json.loads(content)
            read = np.asarray(reply["prompt_token_ids"], np.int32)
            if not np.array_equal(read, np.concatenate([prompt, response])):
                counts = self._processor.image_token_counts
                raise TeacherError(
                    f"it read {len(read)} tokens with images of {counts(read).tolist()} tokens, the policy "
                    f"{len(prompt) + len(response)} with {counts(prompt).tolist()}; the image processors differ"
                )
            rows = reply["prompt_logprobs"][len(prompt) :]
            pairs = zip(rows, response.tolist(), strict=True)
            values = np.array([row[str(token)]["logprob"] for row, token in pairs], np.float32)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise TeacherError(f"its reply has no log-probabilities of the response: {error!r}") from error
        if not np.isfinite(values).all():
            raise TeacherError("a log-probability is not finite; the weights of the teacher are damaged")
        return values

    async def _request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The reply to a POST of `body`, else to a GET; retries faults that may pass. Raises TeacherError."""
        try:
            if body is None:
                return await self._client.get(path, cast_to=bytes)
            return await self._client.post(path, cast_to=bytes, body=body)
        except openai.APIStatusError as error:
            hint = "; start it with --enable-scale-out" if error.status_code == 404 else ""
            text = shorten(redact(" ".join(error.response.text.split())), 300)
            raise TeacherError(f"it refused {path} with status {error.status_code}: {text}{hint}") from None
        except openai.OpenAIError as error:
            raise TeacherError(f"its reply to {path} is invalid: {type(error).__name__}") from None
