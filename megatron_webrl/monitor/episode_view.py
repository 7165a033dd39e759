"""Stored episodes: one as JSON for its page, token by token, and many as a dataset of Hugging Face."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from megatron_webrl.monitor.episode_index import SCHEMA
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


# -- datasets -------------------------------------------------------------------------------------

ROWS_AT_ONCE = 8  # episodes in memory, with their screenshots
_INDEX_FIELDS = [name for name in SCHEMA.names if name not in ("folder", "file", "position", "words", "instruction")]
_IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
_STEP = pa.struct(
    {
        "prompt": pa.string(), "response": pa.string(), "action": pa.string(), "format_error": pa.string(),
        "images": pa.list_(pa.int64()), "logprobs": pa.list_(pa.float32()), "versions": pa.list_(pa.int64()),
        "url": pa.string(), "title": pa.string(),
    }
)  # fmt: skip
DATASET_SCHEMA = pa.schema(
    [
        *(SCHEMA.field(name) for name in _INDEX_FIELDS),
        pa.field("disposition", pa.string()),
        pa.field("instruction", pa.string()),
        pa.field("images", pa.list_(_IMAGE)),
        pa.field("trajectory", pa.list_(_STEP)),
    ]
)


_IMAGES_AS_IMAGES = {"info": {"features": {"images": {"feature": {"_type": "Image"}, "_type": "List"}}}}


def write_dataset(path: Path, episodes: Iterable[tuple[Mapping[str, Any], Trajectory]], texts: TokenTexts) -> None:
    """Write episodes, each with its row of the index, a few in memory at once. Raises OSError."""
    schema = DATASET_SCHEMA.with_metadata({"huggingface": json.dumps(_IMAGES_AS_IMAGES)})
    rows = (_dataset_row(row, trajectory, texts) for row, trajectory in episodes)
    with pq.ParquetWriter(path, schema) as file:
        while batch := list(islice(rows, ROWS_AT_ONCE)):
            file.write_table(pa.Table.from_pylist(batch, schema))


def _dataset_row(row: Mapping[str, Any], trajectory: Trajectory, texts: TokenTexts) -> dict[str, Any]:
    steps = [
        {
            "prompt": texts.text(step.prompt_token_ids),
            "response": texts.text(step.response_token_ids),
            "action": None if step.action is None else json.dumps(asdict(step.action)),
            "format_error": step.format_error,
            "url": _utf8(step.url),
            "title": _utf8(step.title),
            **{name: getattr(step, name).tolist() for name in ("images", "logprobs", "versions")},
        }
        for step in trajectory.steps
    ]
    images = [{"bytes": bytes(image), "path": None} for image in trajectory.images]
    own = {"instruction": _utf8(trajectory.instruction), "images": images, "trajectory": steps}
    return {name: row[name] for name in (*_INDEX_FIELDS, "disposition")} | own


def _utf8(text: str) -> str:
    """The text without lone surrogates, which UTF-8 does not have."""
    return text.encode(errors="replace").decode()
