"""The interface to a source of responses: the vLLM engine, or a scripted policy for demonstrations."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from megatron_webrl.browser.server.client import RemoteSession


@functools.lru_cache(maxsize=16)
def white_image(width: int, height: int) -> bytes:
    """A white screenshot, PNG."""
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "white").save(buffer, "PNG")
    return buffer.getvalue()


class GenerationError(RuntimeError):
    """No usable response; the episode is masked."""

    outcome = "engine_error"


class EngineDeadError(RuntimeError):
    """The engine cannot generate any more; its worker must end."""


@dataclass(frozen=True)
class Generation:
    """One response, and the prompt as the engine expanded it."""

    prompt_token_ids: np.ndarray  # int32 [prompt], image placeholders expanded
    response_token_ids: np.ndarray  # int32 [response], the end token included if it was produced
    logprobs: np.ndarray  # float32 [response], at the sampling temperature
    versions: np.ndarray  # int32 [response], policy version of each token
    image_grids: np.ndarray  # int32 [images, 3], patches (t, h, w)
    text: str  # response decoded, special tokens removed; after the <think> that the prompt ends with, if it does
    finish_reason: str  # "stop" or "length"
    cached_prompt_tokens: int = 0  # prompt tokens from the prefix cache; later recomputation is not subtracted
    experts: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))  # see types.Step


@dataclass(frozen=True)
class ResponseLimits:
    """What ends one response early."""

    max_tokens: int | None = None  # below rollout.max_new_tokens
    stop: tuple[str, ...] = ()  # texts after which it ends

    def response_tokens(self, most: int) -> int:
        """Tokens of the response at most, where rollout.max_new_tokens is `most`."""
        return min(most, self.max_tokens or most)


NO_LIMITS = ResponseLimits()


class Generator(Protocol):
    """A scripted generator asks `session` for a demonstration; others ignore it."""

    async def generate(
        self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes],
        limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        """Respond to `token_ids` (int32, one placeholder per image) and the encoded images.

        Raises GenerationError, also after rollout.operation_timeout_seconds, in which pauses for weights do not count.
        """
        ...
