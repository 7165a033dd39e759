"""What answers a prompt: a vLLM engine while training, a script while demonstrating."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from megatron_webrl.farm.client import RemoteSession


class GenerationError(RuntimeError):
    """The engine gave no usable answer; the episode is masked with outcome `engine_error`."""


@dataclass(frozen=True)
class Generation:
    """One response, token for token, with the prompt as the engine expanded it."""

    prompt_token_ids: np.ndarray  # int32 [prompt], image placeholders expanded
    response_token_ids: np.ndarray  # int32 [response], the end token included if it was produced
    logprobs: np.ndarray  # float32 [response], at the sampling temperature
    versions: np.ndarray  # int32 [response], policy version of each token
    image_grids: np.ndarray  # int32 [images, 3], patches (t, h, w)
    text: str  # response decoded, special tokens removed
    finish_reason: str  # "stop" or "length"
    cached_prompt_tokens: int = (
        0  # tokens of the prompt from the prefix cache; computing again after an update is not told
    )


class Generator(Protocol):
    """Answers one prompt. `session` is for responders that ask it for a demonstration."""

    async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        """Answer the prompt `token_ids` (int32, one placeholder per image) with its encoded images.

        Raises GenerationError.
        """
        ...
