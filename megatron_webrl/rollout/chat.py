"""OpenAI's chat completions: requests as prompts, responses as messages.

A request that continues an earlier one, its answer included, keeps the tokens of both: prompt, answer as it was
generated, new turns. So nothing that was generated is tokenised again, and prefixes stay shared, in the engine's cache
and in training. Other histories are rendered by the chat template. Field names and meanings:
https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np

from megatron_webrl.model.patchifier import open_image
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.generator import Generation, ResponseLimits
from megatron_webrl.rollout.responses import TOOL_CALL_OPEN, split_calls, split_thinking

MODEL = "policy"  # name of the only model
# Arguments that change nothing: the run decides how the policy samples, and nothing is stored or ranked.
_IGNORED = {
    "frequency_penalty", "metadata", "parallel_tool_calls", "presence_penalty", "prompt_cache_key", "reasoning_effort",
    "seed", "service_tier", "store", "temperature", "top_k", "top_p", "user", "verbosity",
}  # fmt: skip
_USED = {"max_completion_tokens", "max_tokens", "messages", "model", "stop", "stream", "stream_options", "tools"}
# Arguments whose other values the engine cannot do without changing the distribution that the policy is trained on.
_FIXED = {
    "n": (None, 1), "tool_choice": (None, "auto", "none"), "logprobs": (None, False), "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}), "logit_bias": (None, {}), "modalities": (None, ["text"]),
}  # fmt: skip
_ROLES = ("system", "developer", "user", "assistant", "tool")


class RequestRefused(ValueError):
    """A request that cannot be answered; the message names its field."""


@dataclass(frozen=True)
class ChatRequest:
    """A checked request. `messages` and `tools` are those of the chat template, their text escaped."""

    messages: list[dict[str, Any]]  # content: text, or a list of {"type": "text", "text": ...} and {"type": "image"}
    images: list[bytes]  # encoded, in the order of the messages
    tools: list[dict[str, Any]]
    limits: ResponseLimits
    stream: bool
    include_usage: bool

    @cached_property
    def keys(self) -> list[str]:
        """For each number of messages, from 0, a digest of the tools and of the messages up to there."""
        keys = [hashlib.sha256(json.dumps(self.tools, sort_keys=True).encode()).hexdigest()]
        images = iter(self.images)
        for message in self.messages:
            parts = message["content"] if isinstance(message["content"], list) else []
            shown = [next(images) for part in parts if part["type"] == "image"]
            keys.append(_digest(keys[-1], message, shown))
        return keys


def parse_request(text: bytes, processor: Processor) -> ChatRequest:
    """Check the body of a request. Raises RequestRefused."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise RequestRefused(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefused("the body is not a JSON object")
    if body.get("model") != MODEL:
        raise RequestRefused(f"model={body.get('model')!r} is not {MODEL!r}, the only model here")
    for name, value in body.items():
        if name in _FIXED and value not in _FIXED[name]:
            raise RequestRefused(f"{name}={json.dumps(value)[:100]} is not possible here; leave it out")
        if value is not None and name not in _USED | _IGNORED | _FIXED.keys():
            raise RequestRefused(f"{name} is not known here; leave it out")
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise RequestRefused("messages is not a list of messages")
    tools = body.get("tools") or []
    if body.get("tool_choice") == "none":
        tools = []
    images: list[bytes] = []
    messages = [
        _message(message, f"messages[{number}]", processor, images) for number, message in enumerate(body["messages"])
    ]
    options = body.get("stream_options") or {}
    return ChatRequest(
        messages, images, _escape(tools, processor), _limits(body), bool(body.get("stream")),
        bool(options.get("include_usage")),
    )  # fmt: skip


def _limits(body: Mapping[str, Any]) -> ResponseLimits:
    tokens, stop = body.get("max_completion_tokens") or body.get("max_tokens"), body.get("stop") or []
    if tokens is not None and not (isinstance(tokens, int) and tokens > 0):
        raise RequestRefused(f"max_tokens={tokens!r} is not a number of tokens")
    stop = [stop] if isinstance(stop, str) else stop
    if not (isinstance(stop, list) and all(isinstance(each, str) and each for each in stop)):
        raise RequestRefused(f"stop={stop!r} is not a list of texts")
    return ResponseLimits(tokens, tuple(stop))


def _message(message: Any, where: str, processor: Processor, images: list[bytes]) -> dict[str, Any]:
    """A message for the chat template; its images are appended to `images`."""
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise RequestRefused(f"{where}.role is not one of {', '.join(_ROLES)}")
    role, content = message["role"], message.get("content")
    if content is None:
        content = ""
    role = "system" if role == "developer" else role
    escape = partial(processor.escape_special_tokens, keep_tags=role == "system")
    if isinstance(content, list):
        content = [_part(part, f"{where}.content[{number}]", escape, images) for number, part in enumerate(content)]
    elif isinstance(content, str):
        content = escape(content)
    else:
        raise RequestRefused(f"{where}.content is neither a text nor a list of parts")
    checked = {"role": role, "content": content}
    if calls := message.get("tool_calls"):
        try:
            functions = [
                {"name": call["function"]["name"], "arguments": _arguments(call["function"]["arguments"])}
                for call in calls
            ]
        except (KeyError, TypeError) as error:
            raise RequestRefused(f"{where}.tool_calls is not a list of function calls: {error!r}") from None
        checked["tool_calls"] = [{"type": "function", "function": each} for each in _escape(functions, processor)]
    return checked


def _part(part: Any, where: str, escape: Callable[[str], str], images: list[bytes]) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": escape(part["text"])}
    if kind != "image_url":
        raise RequestRefused(f"{where}.type={kind!r} is neither text nor image_url")
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    if not (isinstance(url, str) and url.startswith("data:image/") and ";base64," in url):
        raise RequestRefused(f"{where}.image_url.url is not data:image/...;base64,...; addresses are not fetched")
    try:
        data = base64.b64decode(url.partition(";base64,")[2], validate=True)
        open_image(data)
    except (binascii.Error, ValueError) as error:
        raise RequestRefused(f"{where}.image_url.url: {error}") from None
    images.append(data)
    return {"type": "image"}


def _arguments(arguments: Any) -> Any:
    """Arguments of a call as an object: the template writes them as JSON."""
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _escape(value: Any, processor: Processor) -> Any:
    if isinstance(value, str):
        return processor.escape_special_tokens(value)
    if isinstance(value, list):
        return [_escape(each, processor) for each in value]
    if isinstance(value, dict):
        return {_escape(name, processor): _escape(each, processor) for name, each in value.items()}
    return value


@dataclass
class Conversations:
    """The calls of one episode, by which a later one keeps their tokens."""

    processor: Processor
    _known: dict[str, np.ndarray] = field(default_factory=dict)  # by messages: their tokens, up to the end of an answer

    def prompt(self, request: ChatRequest) -> np.ndarray:
        """Tokens of the prompt, int32 [n], one placeholder for each image."""
        processor, messages = self.processor, request.messages
        for answered in range(len(messages) - 1, 0, -1):
            if messages[answered - 1]["role"] == "assistant" and request.keys[answered] in self._known:
                later = processor.encode_turn(*messages[answered:])
                return np.concatenate([self._known[request.keys[answered]], later]).astype(np.int32)
        return processor.encode_chat(messages, request.tools)

    def add(self, request: ChatRequest, prompt: np.ndarray, generation: Generation) -> tuple[dict[str, Any], str]:
        """Remember a response to `prompt` (int32 [n], unexpanded); returns it as a message, and the finish reason."""
        thoughts, answer = split_thinking(_stopped(generation.text, request.limits.stop))
        content, calls = _tool_calls(answer) if request.tools else (answer.strip(), [])
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = [
                {"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": call} for call in calls
            ]
        reason = "length" if generation.finish_reason == "length" else "tool_calls" if calls else "stop"
        response, end = generation.response_token_ids, self.processor.eos_token_id
        if not self.processor.has_special_tokens(response):  # else an image or the end of a turn for the engine
            repeated = _message(message, "", self.processor, [])
            closing = [] if response[-1] == end else [end]
            self._known[_digest(request.keys[-1], repeated, [])] = np.concatenate([prompt, response, closing])
        return message, reason


def _digest(before: str, message: Mapping[str, Any], images: Sequence[bytes]) -> str:
    content = message["content"]
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        content = "".join(part["text"] for part in content)
    shown = [before, message["role"], content, message.get("tool_calls", [])]
    digest = hashlib.sha256(json.dumps(shown, sort_keys=True).encode())
    for image in images:
        digest.update(hashlib.sha256(image).digest())
    return digest.hexdigest()


def _stopped(text: str, stop: Sequence[str]) -> str:
    """The text before the first of the texts that end a response."""
    return text[: min((place for each in stop if (place := text.find(each)) >= 0), default=len(text))]


def _tool_calls(answer: str) -> tuple[str, list[dict[str, str]]]:
    """The text around the tool calls of an answer, and the calls; what is no call stays text."""
    text, calls, pieces = [], [], iter(split_calls(answer))
    for piece in pieces:
        if piece != TOOL_CALL_OPEN:
            text.append(piece)
            continue
        body = next(pieces, "")
        try:
            call = json.loads(body)
            calls.append({"name": call["name"], "arguments": json.dumps(call.get("arguments", {}), ensure_ascii=False)})
            next(pieces, "")  # its closing tag
        except (ValueError, KeyError, TypeError, AttributeError):
            text += [piece, body]
    return "".join(text).strip(), calls


def completion(message: Mapping[str, Any], reason: str, generation: Generation, number: int) -> dict[str, Any]:
    """The response to a request."""
    return _envelope(number, "chat.completion") | {
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason, "logprobs": None}],
        "usage": _usage(generation),
    }


def events(
    message: Mapping[str, Any], reason: str, generation: Generation, number: int, include_usage: bool
) -> Iterator[bytes]:
    """The response to a request with stream=true, as server-sent events: it comes as a whole."""
    calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls", ()))]
    delta = dict(message) | ({"tool_calls": calls} if calls else {})
    for part, finish in ((delta, None), ({}, reason)):
        chunk = _envelope(number, "chat.completion.chunk")
        yield _event(chunk | {"choices": [{"index": 0, "delta": part, "finish_reason": finish}]})
    if include_usage:
        yield _event(_envelope(number, "chat.completion.chunk") | {"choices": [], "usage": _usage(generation)})
    yield b"data: [DONE]\n\n"


def _event(value: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _envelope(number: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 0, "model": MODEL}


def _usage(generation: Generation) -> dict[str, Any]:
    prompt, response = len(generation.prompt_token_ids), len(generation.response_token_ids)
    return {
        "prompt_tokens": prompt, "completion_tokens": response, "total_tokens": prompt + response,
        "prompt_tokens_details": {"cached_tokens": generation.cached_prompt_tokens},
    }  # fmt: skip
