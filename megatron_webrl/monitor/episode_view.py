"""A stored episode as JSON for its page, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from megatron_webrl.types import Step, Trajectory

MAX_TEXT = 100_000  # characters of one text in an answer; longer ones are cut, and say so
IMAGE_TOKEN = "<|image_pad|>"


class TokenTexts:
    """Decodes token ids with the tokenizer of a model's folder; without one, tokens show as their numbers."""

    def __init__(self, model: Path) -> None:
        file = model / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(file)) if file.is_file() else None
        self.image_token = None if self._tokenizer is None else self._tokenizer.token_to_id(IMAGE_TOKEN)

    def text(self, ids: np.ndarray) -> str:
        """The text of tokens, special ones included."""
        if self._tokenizer is None:
            return " ".join(f"<{number}>" for number in ids.tolist())
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def pieces(self, ids: np.ndarray) -> list[str]:
        """The text that each token adds; empty until a character is complete, which the last one need not be."""
        if self._tokenizer is None:
            return [f"<{number}>" for number in ids.tolist()]
        stream = DecodeStream(skip_special_tokens=False)
        found = [stream.step(self._tokenizer, number) or "" for number in ids.tolist()]
        rest = self.text(ids)[len("".join(found)) :]
        return [*found[:-1], found[-1] + rest] if found else []


def episode_json(
    trajectory: Trajectory, row: Mapping[str, Any], advantage: float | None, texts: TokenTexts
) -> dict[str, Any]:
    """`row`: of the index; `advantage`: mean of the steps, as if the group were the batch; None if
    the episode is masked or alone.
    """
    task, verdict, reward, answer = trajectory.task, trajectory.verdict, trajectory.page_reward, trajectory.answer
    return {
        **row,
        "instruction": cut(trajectory.instruction),
        "images": len(trajectory.images),
        "group_size": trajectory.group_size,
        "temperature": trajectory.temperature,
        "discarded_tokens": trajectory.discarded_tokens,
        "page_reward": reward if reward is not None and math.isfinite(reward) else None,
        "answer": answer and cut(answer),
        "advantage": advantage,
        "verdict": None if verdict is None else asdict(verdict),
        "evaluation_input": {"answer": task.answer, "facts": [asdict(each) for each in task.facts]},
        "steps": [_step_json(number, step, texts) for number, step in enumerate(trajectory.steps)],
    }


def _step_json(number: int, step: Step, texts: TokenTexts) -> dict[str, Any]:
    images = step.images.tolist()
    response = zip(
        texts.pieces(step.response_token_ids), step.logprobs.tolist(), step.versions.tolist(), strict=True
    )  # fmt: skip
    action = None if step.action is None else {k: v for k, v in asdict(step.action).items() if v is not None}
    if action and "text" in action:
        action["text"] = cut(action["text"])
    names = ("finish_reason", "format_error", "url", "title", "page_changed", "cached_prompt_tokens")
    return {
        "number": number + 1,
        "image": images[-1] if images else None,
        "images": images,
        # Earlier screenshots of the episode that the prompt lacks: the context's window has dropped them.
        "dropped_images": sorted(set(range(images[-1])) - set(images)) if images else [],
        "prompt": list(_prompt(step, images, texts)),
        "prompt_tokens": len(step.prompt_token_ids),
        "response": cut(texts.text(step.response_token_ids)),
        "tokens": [
            {"text": text, "logprob": round(logprob, 4), "version": version} for text, logprob, version in response
        ],
        "action": action,
        "leniencies": list(step.leniencies),
        "seconds_generation": round(step.seconds_generation, 3),
        "seconds_browser": round(step.seconds_browser, 3),
        **{name: getattr(step, name) for name in names},
    }


def _prompt(step: Step, images: list[int], texts: TokenTexts) -> Iterator[dict[str, Any]]:
    """The prompt in order: {"text"}, and {"image", "tokens"} for each run of image placeholders."""
    remaining = iter(images)
    is_image = step.prompt_token_ids == (-1 if texts.image_token is None else texts.image_token)
    position = 0
    for placeholder, run in groupby(is_image.tolist()):
        length = sum(1 for _ in run)
        if placeholder:
            yield {"image": next(remaining, None), "tokens": length}
        else:
            yield {"text": cut(texts.text(step.prompt_token_ids[position : position + length]))}
        position += length


def cut(text: str) -> str:
    """A text of MAX_TEXT characters at most."""
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text) - MAX_TEXT} more characters)"
