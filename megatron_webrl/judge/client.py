"""Requests to an OpenAI-compatible endpoint: retries, limits, budget, cache."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import random
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import time
from typing import Any

import openai
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_exponential

from megatron_webrl.config.judge import TOKEN_LIMITS, JudgeConfig, JudgeModelConfig
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.judge.budget import Usage, UsageMeter
from megatron_webrl.judge.replies import UnusableReply
from megatron_webrl.util import atomic_file, network
from megatron_webrl.util.text import declare_secret, redact, shorten

_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})  # and all of 500 and above
_QUIET_LOGGERS = ("openai", "httpx", "httpx2", "httpcore", "httpcore2")  # at DEBUG they name URLs, headers and bodies


def open_client(url: str, key_variable: str, settings: str, timeout_seconds: float) -> openai.AsyncOpenAI:
    """A client without retries, whose key is declared a secret.

    `settings`: the section of `url` and `key_variable`, for errors, such as judge.*. Raises ConfigError for a missing
    key, and for a key or an address that cannot be used.
    """
    for name in _QUIET_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
    key = os.environ.get(key_variable, "").strip() if key_variable else ""
    if key_variable and not key:
        # A name that is not in capitals may be a key that was put there by mistake.
        name = key_variable if key_variable.isupper() else "an environment variable that"
        raise ConfigError(f"{name} is not set ({settings}.key_variable); it must hold the key of {url}")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the key of {url} has characters that no header can hold ({settings}.key_variable names its "
            "environment variable); copy it again"
        )
    try:
        client = openai.AsyncOpenAI(api_key=key or "none", base_url=url, max_retries=0, timeout=timeout_seconds)
    except Exception as error:
        raise ConfigError(f"{settings}.url={url} is not an endpoint: {type(error).__name__}") from None
    declare_secret(key)
    return client


def is_transient(status: int) -> bool:
    """Whether an HTTP status may pass: another attempt may succeed."""
    return status in _TRANSIENT_STATUS or status >= 500


log = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True)
class CachedReply:
    """The reply to a request, as the endpoint sent it."""

    content: str
    prompt_tokens: int
    response_tokens: int
    format: int = FORMAT_VERSION


class ReplyCache:
    """Files <folder>/<first two digits>/<digest>.json. A file appears when it is complete; a damaged one is ignored."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) if folder else None
        self._warned = False

    def get(self, digest: str) -> CachedReply | None:
        if self.folder is None:
            return None
        try:
            found = CachedReply(**json.loads(self._path(self.folder, digest).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.format == FORMAT_VERSION and isinstance(found.content, str) else None

    def put(self, digest: str, reply: CachedReply) -> None:
        """Keep a reply; a folder that cannot be written costs the reply, not the verdict."""
        if self.folder is None:
            return
        path = self._path(self.folder, digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write_json(path, asdict(reply))
        except OSError as error:
            if not self._warned:
                log.warning("judge.cache=%s cannot be written: %s; replies are not kept", self.folder, error.strerror)
            self._warned = True

    @staticmethod
    def _path(folder: Path, digest: str) -> Path:
        return folder / digest[:2] / f"{digest}.json"


SCHEMA_TRIALS = 3  # unparsable replies, and no usable one, of an endpoint that seems to ignore response_format
SLOTS = ("verdict", "blocked", "relevance")
FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS = 0.25, 15.0
MAX_RETRY_AFTER_SECONDS = 300.0  # an endpoint that asks for more is tried again after this
IMAGE_TOKENS = 1_500  # estimate, for reservations; an endpoint reports what it counted
CHARS_PER_TOKEN = 3  # estimate, for reservations
MAX_TOKEN_COUNT = 10**9  # a reported count above it is taken for none
_QUOTATION = re.compile(r"""(?<!\w)(["'`])(?![\w.]+\1)(?:\\.|(?!\1).)*\1""", re.DOTALL)  # of more than a name
_BACKOFF = wait_exponential(FIRST_BACKOFF_SECONDS, LAST_BACKOFF_SECONDS)


class RequestFailed(Exception):
    """The endpoint gave no reply and never will within the deadline, or refused the request. `name` in a word."""

    def __init__(self, name: str, text: str = "") -> None:
        super().__init__(f"{name}: {text}" if text else name)
        self.name, self.text = name, text


class SchemaRefused(Exception):
    """The endpoint does not know response_format, or ignores it."""


class _Transient(Exception):
    """A fault of the endpoint that may pass."""

    def __init__(self, name: str, retry_after: float | None = None) -> None:
        super().__init__(name)
        self.name, self.retry_after = name, retry_after


@dataclass(frozen=True)
class JudgeModel:
    """A model slot with what it does not name taken from judge.verdict."""

    name: str
    url: str
    key_variable: str
    input_price: float  # US dollars for a million tokens
    output_price: float
    options: Mapping[str, Any]  # arguments of requests; None leaves one out

    @classmethod
    def resolve(cls, settings: JudgeConfig, slot: str) -> JudgeModel:
        """The model of a slot. Raises ConfigError without a name or an endpoint.

        Prices and options follow the name, and the key variable the endpoint: those of another one would be wrong.
        """
        own: JudgeModelConfig = getattr(settings, slot, settings.verdict)
        base = settings.verdict
        for key in ("name", "url"):
            if not getattr(own, key) and not getattr(base, key):
                raise ConfigError(f"judge.verdict.{key} is empty; the evaluator judge needs the model's {key}")
        if own.options and not own.name:
            raise ConfigError(f"judge.{slot}.options are of no model; set judge.{slot}.name, too")
        kind = own if own.name else base
        return cls(
            own.name or base.name, own.url or base.url, own.key_variable or ("" if own.url else base.key_variable),
            kind.input_price, kind.output_price, kind.options,
        )  # fmt: skip

    def usage(self, calls: int, prompt_tokens: int, response_tokens: int) -> Usage:
        dollars = (prompt_tokens * self.input_price + response_tokens * self.output_price) / 1e6
        return Usage(calls, prompt_tokens + response_tokens, dollars)


@dataclass(frozen=True)
class Completion:
    """A reply as the endpoint sent it."""

    content: str
    finish_reason: str | None
    prompt_tokens: int
    response_tokens: int


@dataclass
class Spending:
    """What the requests of one verdict have cost so far, and the faults they met."""

    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    dollars: float = 0.0


@dataclass
class _Endpoint:
    client: openai.AsyncOpenAI
    mode: str  # one of replies.MODES
    not_before: float = 0.0  # loop time before which it asked for no requests
    reported: set[str] = field(default_factory=set)  # faults that have been logged
    unparsable: int = 0  # replies in mode schema before the first usable one
    knows_schemas: bool = False  # it has sent a usable reply in mode schema


class JudgeClient:
    """Sends requests of all verdicts of a process. An async context manager."""

    def __init__(self, settings: JudgeConfig, meter: UsageMeter) -> None:
        """Raises ConfigError for a missing model, endpoint or key, and for settings beyond their limits."""
        check_sections(settings, "judge.")
        self._settings, self._meter = settings, meter
        self.models = {slot: JudgeModel.resolve(settings, slot) for slot in SLOTS}
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._endpoints: dict[tuple[str, str, str], _Endpoint] = {}  # models of one address differ in what they know
        for model in self.models.values():
            if _key(model) not in self._endpoints:
                self._endpoints[_key(model)] = _open_endpoint(model, settings)

    async def __aenter__(self) -> JudgeClient:
        network.use_own_threads()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for endpoint in self._endpoints.values():
            await endpoint.client.close()

    def mode(self, slot: str) -> str:
        """How replies of a slot's endpoint are constrained: one of replies.MODES."""
        return self._endpoint(slot).mode

    def note_schema_reply(self, slot: str, fault: str) -> None:
        """Note whether a reply in mode schema was usable: its `fault` is "", or the name of an UnusableReply.

        Raises SchemaRefused for an unparsable one if replies of the endpoint are to end with a line.
        """
        endpoint = self._endpoint(slot)
        endpoint.knows_schemas |= not fault
        if fault != "unparsable" or endpoint.knows_schemas or self._settings.structured != "auto":
            return
        endpoint.unparsable += 1
        if endpoint.unparsable >= SCHEMA_TRIALS:
            _leave_schemas(endpoint, f"ignores response_format in its first {SCHEMA_TRIALS} replies")
            raise SchemaRefused

    async def complete(
        self, slot: str, body: Mapping[str, Any], images: int, deadline: float, spending: Spending, faults: list[str]
    ) -> Completion:
        """Send a request until the endpoint replies, but not beyond `deadline` (loop time).

        `body`: arguments of chat.completions, without the model; `images`: how many it contains. Appends the name of
        each fault to `faults`. Raises RequestFailed (named after the last fault, if there was one), UnusableReply (a
        reply that is no chat completion), SchemaRefused and BudgetSpent.
        """
        endpoint, known = self._endpoint(slot), len(faults)

        def after(state: RetryCallState) -> None:
            fault = state.outcome.exception() if state.outcome else None
            if isinstance(fault, _Transient):
                faults.append(fault.name)
                self._report(endpoint, fault.name)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Transient), wait=_delay, after=after, reraise=True,
            stop=lambda state: asyncio.get_running_loop().time() + state.upcoming_sleep >= deadline,
        )  # fmt: skip
        try:
            async with asyncio.timeout_at(deadline):
                return await retrying(self._send, slot, endpoint, body, images, spending)
        except _Transient as fault:
            raise RequestFailed(fault.name, "until the deadline") from None
        except TimeoutError:
            raise RequestFailed(faults[-1] if len(faults) > known else "deadline", "until the deadline") from None

    def _endpoint(self, slot: str) -> _Endpoint:
        return self._endpoints[_key(self.models[slot])]

    async def _send(
        self, slot: str, endpoint: _Endpoint, body: Mapping[str, Any], images: int, spending: Spending
    ) -> Completion:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(max(0.0, endpoint.not_before - loop.time()))
            async with self._slots:
                if loop.time() >= endpoint.not_before:
                    return await self._send_counted(slot, endpoint, body, images, spending)

    async def _send_counted(
        self, slot: str, endpoint: _Endpoint, body: Mapping[str, Any], images: int, spending: Spending
    ) -> Completion:
        """Send once, within the budget; a request without a known cost keeps its estimate in the budget."""
        model = self.models[slot]
        prompt = _text_chars(body) // CHARS_PER_TOKEN + IMAGE_TOKENS * images
        estimate = model.usage(1, prompt, next(body[name] for name in TOKEN_LIMITS if name in body))
        hour = await self._meter.reserve(estimate)
        actual = estimate
        spending.calls += 1
        try:
            content = await self._post(endpoint, {**body, "model": model.name})
            completion, actual = _read(content, model, estimate)
            if completion is None:
                raise UnusableReply("unparsable_response", redact(content.decode("utf-8", "replace")))
            spending.prompt_tokens += completion.prompt_tokens
            spending.response_tokens += completion.response_tokens
            spending.dollars += actual.dollars
            return replace(completion, content=redact(completion.content))
        except (_Transient, RequestFailed, SchemaRefused) as fault:
            if getattr(fault, "name", "") != "timeout":
                actual = Usage(calls=1)
            raise
        finally:
            await self._meter.settle(hour, estimate, actual)

    async def _post(self, endpoint: _Endpoint, body: Mapping[str, Any]) -> bytes:
        """The body of the response. Faults are raised without their cause, which holds the request and its key."""
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                # Not chat.completions.create: its copy of a body with many screenshots costs more than all else here.
                return await endpoint.client.post("/chat/completions", cast_to=bytes, body=body)
        except (TimeoutError, openai.APITimeoutError):
            raise _Transient("timeout") from None
        except openai.APIConnectionError:
            raise _Transient("connection") from None
        except openai.APIStatusError as error:
            may_leave_schemas = self._settings.structured == "auto" and "response_format" in body
            raise self._refusal(endpoint, error, may_leave_schemas) from None
        except openai.OpenAIError as error:
            raise UnusableReply("unparsable_response", type(error).__name__) from None

    def _refusal(self, endpoint: _Endpoint, error: openai.APIStatusError, may_leave_schemas: bool) -> Exception:
        status, loop = error.status_code, asyncio.get_running_loop()
        if is_transient(status):
            retry_after = _retry_after(error.response.headers)
            if status == 429 and retry_after:
                endpoint.not_before = max(endpoint.not_before, loop.time() + retry_after)
            return _Transient("rate_limited" if status == 429 else "server_error", retry_after)
        if status in (400, 422) and may_leave_schemas and names_response_format(error.body):
            _leave_schemas(endpoint, "refuses response_format")
            return SchemaRefused()
        text = shorten(redact(" ".join(error.response.text.split())), 300)
        self._report(endpoint, f"status {status}: {text}")
        return RequestFailed("refused_request", f"status {status}: {text}")

    def _report(self, endpoint: _Endpoint, fault: str) -> None:
        """Log each kind of fault of an endpoint once."""
        if fault not in endpoint.reported:
            endpoint.reported.add(fault)
            log.warning("the judge's endpoint %s: %s (logged once)", endpoint.client.base_url, fault)


def _key(model: JudgeModel) -> tuple[str, str, str]:
    return model.url, model.key_variable, model.name


def _open_endpoint(model: JudgeModel, settings: JudgeConfig) -> _Endpoint:
    client = open_client(model.url, model.key_variable, "judge.*", settings.timeout_seconds)
    return _Endpoint(client, "line" if settings.structured == "line" else "schema")


def _leave_schemas(endpoint: _Endpoint, reason: str) -> None:
    if endpoint.mode == "schema":
        endpoint.mode = "line"
        log.warning("the judge's endpoint %s %s; replies end with an exact line instead", endpoint.client.base_url,
                    reason)  # fmt: skip


def names_response_format(body: object) -> bool:
    """Whether an error is about response_format: by its parameter, else by its message without longer quotations.

    Those may be of the prompt, in which pages and agents can write the word. `body`: of openai.APIStatusError.
    """
    if isinstance(body, list) and body and isinstance(body[0], Mapping):
        body = body[0].get("error", body[0])
    fields = body if isinstance(body, Mapping) else {"message": body}
    message = fields.get("message") or fields.get("detail") or ""
    if isinstance(message, list):  # of pydantic, with the request in "input"
        message = " ".join(f"{each.get('loc')} {each.get('msg')}" for each in message if isinstance(each, Mapping))
    return "response_format" in str(fields.get("param") or _QUOTATION.sub("", str(message)))


def _delay(state: RetryCallState) -> float:
    """An exponential delay of which half is random; at least Retry-After and a random second."""
    fault = state.outcome.exception() if state.outcome else None
    asked = fault.retry_after if isinstance(fault, _Transient) else None
    backoff = _BACKOFF(state) * (0.5 + random.random() / 2)
    return backoff if asked is None else max(backoff, asked + random.random() * min(1.0, max(0.1, asked)))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of Retry-After, a number or a date, at most MAX_RETRY_AFTER_SECONDS; None without a valid one."""
    text = headers.get("retry-after", "")
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(text).timestamp() - time()
        except ValueError:
            return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS) if math.isfinite(seconds) else None


def _text_chars(body: Mapping[str, Any]) -> int:
    parts = [part for message in body["messages"] for part in _parts(message["content"])]
    return sum(len(part.get("text", "")) for part in parts)


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"text": content}] if isinstance(content, str) else content


def _read(content: bytes, model: JudgeModel, estimate: Usage) -> tuple[Completion | None, Usage]:
    """The reply and what it cost; None for a response that is no chat completion with one choice."""
    try:
        found = json.loads(content)
        (choice,) = found["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        if choice["message"].get("refusal"):
            text, reason = str(choice["message"]["refusal"]), "content_filter"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None, estimate
    usage = found.get("usage")
    counts = [usage.get(key) for key in ("prompt_tokens", "completion_tokens")] if isinstance(usage, dict) else [None]
    known = len(counts) == 2 and all(type(count) is int and 0 <= count <= MAX_TOKEN_COUNT for count in counts)
    prompt, response = (counts[0], counts[1]) if known else (0, 0)
    completion = Completion(text if isinstance(text, str) else "", reason if isinstance(reason, str) else None,
                            prompt or 0, response or 0)  # fmt: skip
    return completion, model.usage(1, completion.prompt_tokens, completion.response_tokens) if known else estimate
