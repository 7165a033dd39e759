"""Samples of `webrl check model`: conversations with images and a response, read from a file or built in."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from PIL import Image, ImageDraw

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.processor import Processor, decode_image

ROLES = ("system", "user", "assistant", "tool")
SYSTEM_PROMPT = "You are a web agent. You see a screenshot of a page and say what you do next."
LONG_SAMPLE_PAGE_SIZE = (480, 320)  # pixels of the screenshots in the long sample
LENGTH_SLACK_TOKENS = 8  # tokens by which the long sample may fall short of its length


@dataclass(frozen=True)
class ModelSample:
    """A prompt with its images, and the response whose tokens are scored."""

    name: str
    token_ids: np.ndarray  # int32 [n], one placeholder per image
    prompt_token_ids: np.ndarray  # int32 [prompt], placeholders expanded
    images: tuple[bytes, ...]  # encoded, in prompt order
    image_grids: np.ndarray  # int32 [images, 3], patches (t, h, w)
    response_token_ids: np.ndarray  # int32 [response]; empty: transformers samples one

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_token_ids) + len(self.response_token_ids)


def read_samples(path: Path, processor: Processor, max_model_len: int, max_new_tokens: int) -> list[ModelSample]:
    """Samples of a JSONL file: {"messages": [...], "response": "..."} on each line.

    A message has "role" and "content": text, or a list of {"type": "text", "text": ...} and
    {"type": "image", "path": ...} ("image" for "path" is the same), paths relative to the file. Without a response
    `max_new_tokens` tokens are reserved for one. Raises ConfigError naming file and line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"samples file {path} cannot be read: {error}") from error
    samples = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            messages, images, response = _parse(json.loads(line), path.parent)
            sample = _sample(f"line {number}", messages, images, response, processor)
            _check_length(sample, max_model_len, max_new_tokens)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} line {number} is not valid JSON: {error}") from error
        except ValueError as error:
            raise ConfigError(f"{path} line {number}: {error}") from error
        samples.append(sample)
    if not samples:
        raise ConfigError(f"samples file {path} contains no sample")
    return samples


def built_in_samples(processor: Processor, max_model_len: int, max_new_tokens: int) -> list[ModelSample]:
    """Text; a screenshot; three image sizes; one that fills `max_model_len`. Raises ConfigError if it is too small."""
    screenshot = [draw_page(1, 640, 400)]
    several = [draw_page(2, 320, 480), draw_page(3, 512, 160), draw_page(4, 128, 128)]
    samples = [
        _sample("text", _chat("Name three things that a shop's page shows."), [], None, processor),
        _sample("screenshot", _chat("Task: put the book in the basket.", 1), screenshot, None, processor),
        _sample("three images", _chat("Which of these pages asks for an address?", 3), several, None, processor),
        _long_sample(processor, max_model_len - max_new_tokens),
    ]
    for sample in samples:
        try:
            _check_length(sample, max_model_len, max_new_tokens)
        except ValueError as error:
            raise ConfigError(f"sample {sample.name!r}: {error}") from error
    return samples


def _check_length(sample: ModelSample, max_model_len: int, max_new_tokens: int) -> None:
    prompt, answer = len(sample.prompt_token_ids), len(sample.response_token_ids) or max_new_tokens
    if prompt + answer > max_model_len:
        raise ValueError(f"{prompt} prompt tokens and {answer} response tokens exceed --max-model-len={max_model_len}")


def _sample(
    name: str, messages: list[dict[str, Any]], images: Iterable[bytes], response: str | None, processor: Processor
) -> ModelSample:
    encoded = tuple(images)
    try:
        tokens = processor.encode_chat(messages)
    except TemplateError as error:
        raise ValueError(f"the chat template refuses the messages: {' '.join(str(error).split())}") from error
    grids = processor.grids(encoded)
    response_token_ids = np.zeros(0, np.int32) if response is None else processor.encode_response(response)
    if (response_token_ids == processor.image_token_id).any():
        raise ValueError("the response contains an image placeholder; images are allowed in messages only")
    return ModelSample(name, tokens, processor.expand_image_tokens(tokens, grids), encoded, grids, response_token_ids)


def _chat(text: str, images: int = 0) -> list[dict[str, Any]]:
    content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]


def _long_sample(processor: Processor, length: int) -> ModelSample:
    """Rounds of screenshots and answers, then text, with a prompt of `length` tokens or a few less."""
    page = cache(lambda number: draw_page(10 + number, *LONG_SAMPLE_PAGE_SIZE))

    def make(rounds: int, filler_words: int) -> ModelSample:
        rng = random.Random(5)
        messages = [{"role": "system", "content": SYSTEM_PROMPT}]
        for _ in range(rounds):
            messages += _chat(random_words(rng, 12), 1)[1:]
            messages.append({"role": "assistant", "content": f"I click on {random_words(rng, 6)}."})
        messages += _chat(random_words(random.Random(6), filler_words) if filler_words else "Go on.")[1:]
        return _sample("long", messages, map(page, range(rounds)), None, processor)

    if len(make(0, 0).prompt_token_ids) > length:
        raise ConfigError(f"--max-model-len leaves {length} tokens for a prompt; the long sample needs more")
    rounds = _largest(lambda n: len(make(n, 0).prompt_token_ids) <= length, 1, length // 2)
    filler_words = _largest(lambda n: len(make(rounds, n).prompt_token_ids) <= length - LENGTH_SLACK_TOKENS, 1, length)
    return make(rounds, filler_words)


def _largest(fits: Callable[[int], bool], step: int, limit: int) -> int:
    """The largest number up to `limit` that fits, 0 if none does. `fits` must be monotone."""
    low, high = 0, step
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _parse(line: Any, folder: Path) -> tuple[list[dict[str, Any]], list[bytes], str | None]:
    """Messages in the processor's format, images in order, response. Raises ValueError."""
    if not isinstance(line, dict) or not isinstance(line.get("messages"), list) or not line["messages"]:
        raise ValueError('expected {"messages": [at least one message], "response": text}')
    unknown = sorted(set(line) - {"messages", "response"})
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; known are messages and response")
    response = line.get("response")
    if response is not None and not isinstance(response, str):
        raise ValueError(f"response is {type(response).__name__}, expected text")
    images: list[bytes] = []
    return [_message(message, folder, images) for message in line["messages"]], images, response


def _message(message: Any, folder: Path, images: list[bytes]) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES or "content" not in message:
        raise ValueError(f'a message is {{"role": one of {", ".join(ROLES)}, "content": text or a list of parts}}')
    content = message["content"]
    if isinstance(content, list):
        content = [_part(part, folder, images) for part in content]
    elif not isinstance(content, str):
        raise ValueError(f"content is {type(content).__name__}, expected text or a list of parts")
    return {"role": message["role"], "content": content}


def _part(part: Any, folder: Path, images: list[bytes]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    path = part.get("path", part.get("image")) if kind == "image" else None
    if not isinstance(path, str):
        raise ValueError(
            f'{json.dumps(part)} is neither {{"type": "text", "text": ...}} nor {{"type": "image", "path": ...}}'
        )
    try:
        data = (folder / path).read_bytes()
    except OSError as error:
        raise ValueError(f"image {folder / path} cannot be read: {error.strerror}") from error
    try:
        decode_image(data)
    except ValueError as error:
        raise ValueError(f"image {folder / path}: {error}") from error
    images.append(data)
    return {"type": "image"}


# -- screenshots of synthetic pages, drawn without a browser ---------------------------------------------------------

_WORDS = (
    "account address basket blue book cancel cart check city clear click close colour compare date delete details "
    "email find first flight form green hotel last list login mail menu message month name next night number "
    "offer open order page password pay phone pick plane price red remove reply room save score search select "
    "send size small sort start step stop street submit table text ticket total train travel user view week "
    "window year"
)
WORDS = _WORDS.split()
BACKGROUND, INK, LINE = (250, 250, 252), (32, 36, 44), (206, 210, 218)
COLOURS = ((38, 99, 235), (22, 148, 90), (208, 60, 60), (120, 80, 200), (230, 150, 30))


def draw_page(seed: int, width: int, height: int) -> bytes:
    """A page with a header, lines of text, fields and buttons, as PNG of width x height pixels."""
    rng = random.Random(seed)
    image = Image.new("RGB", (width, height), BACKGROUND)
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, width, 22), fill=rng.choice(COLOURS))
    draw.text((8, 5), random_words(rng, 3).title(), fill=BACKGROUND)
    y = 32
    while y < height - 12:
        kind = rng.choice(("text", "text", "text", "field", "button", "rule"))
        if kind == "text":
            draw.text((8, y), random_words(rng, max(2, width // 56)), fill=INK)
            y += 15
        elif kind == "field":
            draw.text((8, y + 4), random_words(rng, 1), fill=INK)
            draw.rectangle((84, y, min(width - 8, 84 + rng.randint(60, 200)), y + 19), outline=LINE, width=2)
            y += 28
        elif kind == "button":
            left = rng.randint(8, max(8, width // 2))
            draw.rectangle((left, y, left + 76, y + 21), fill=rng.choice(COLOURS))
            draw.text((left + 8, y + 5), random_words(rng, 1), fill=BACKGROUND)
            y += 30
        else:
            draw.line((8, y + 4, width - 8, y + 4), fill=LINE)
            y += 10
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def random_words(rng: random.Random, count: int) -> str:
    """`count` words, drawn with replacement."""
    return " ".join(rng.choices(WORDS, k=count))
