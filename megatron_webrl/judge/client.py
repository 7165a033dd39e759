"""Requests to an OpenAI-compatible endpoint: limits, budget. openai's client repeats what may pass."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.judge import TOKEN_LIMITS, BudgetConfig, JudgeConfig
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.judge.budget import Usage, UsageMeter
from megatron_webrl.judge.replies import UnusableReply
from megatron_webrl.util import network
from megatron_webrl.util.text import declare_secret, redact, shorten

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

VERDICT_SLOT = "verdict"
SLOTS = (VERDICT_SLOT, "blocked", "relevance")
IMAGE_TOKENS = 1_500  # estimate, for reservations; an endpoint reports what it counted
CHARS_PER_TOKEN = 3  # estimate, for reservations
MAX_TOKEN_COUNT = 10**9  # a reported count above it is taken for none
_RETRY_HEADER = "x-stainless-retry-count"  # of openai's requests
_QUIET_LOGGERS = ("openai", "httpx", "httpx2", "httpcore", "httpcore2")  # at DEBUG they name URLs, headers and bodies


def open_client(
    url: str, key_variable: str, settings: str, timeout_seconds: float, faults: list[str] | None = None
) -> openai.AsyncOpenAI:
    """A client that repeats what may pass until its caller's deadline, and whose key is declared a secret.

    `settings`: the section of `url` and `key_variable`, for errors, such as judge.*. `faults` gets each kind of fault
    once. Raises ConfigError for a missing key, and for a key or an address that cannot be used.
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
    import openai  # takes a second

    try:
        http = openai.DefaultAsyncHttpxClient(event_hooks=_fault_log(url, settings, [] if faults is None else faults))
        client = openai.AsyncOpenAI(
            api_key=key or "none", base_url=url, max_retries=10**6, timeout=timeout_seconds, http_client=http
        )
    except Exception as error:
        raise ConfigError(f"{settings}.url={url} is not an endpoint: {type(error).__name__}") from None
    declare_secret(key)
    return client


class RequestFailed(UnusableReply):
    """The endpoint gave no reply within the deadline, or refused the request: it is not asked again."""


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
        voters = dict(zip(voter_slots(settings)[1:], settings.voters, strict=True))
        own = voters[slot] if slot in voters else getattr(settings, slot, settings.verdict)
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


def voter_slots(settings: JudgeConfig) -> list[str]:
    """The slots of the models that give verdicts: judge.verdict and judge.voters."""
    return [VERDICT_SLOT, *(f"voters[{number}]" for number in range(len(settings.voters)))]


def check_prices(budget: BudgetConfig, models: Mapping[str, JudgeModel]) -> None:
    """Raise ConfigError if a limit in dollars does not count a model. `models`: by the slots that are used."""
    for slot, model in models.items():
        if budget.dollars_per_hour and not model.input_price and not model.output_price:
            raise ConfigError(
                f"judge.budget.dollars_per_hour={budget.dollars_per_hour:g} does not count the model of judge.{slot}, "
                f"which has no price; set judge.{slot}.input_price and output_price (US dollars for a million tokens; "
                "0.001 for a free model), or limit calls_per_hour or tokens_per_hour instead"
            )


@dataclass(frozen=True)
class Completion:
    """A reply as the endpoint sent it."""

    content: str
    finish_reason: str | None
    tokens: tuple[int, int] | None  # of prompt and response, if reported


@dataclass
class Spending:
    """What the requests of one verdict have cost so far."""

    calls: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    dollars: float = 0.0


class JudgeClient:
    """Sends requests of all verdicts of a process. An async context manager."""

    def __init__(self, settings: JudgeConfig, meter: UsageMeter) -> None:
        """Raises ConfigError for a missing model, endpoint or key, and for settings beyond their limits."""
        check_sections(settings, "judge.")
        self._meter = meter
        self.models = {slot: JudgeModel.resolve(settings, slot) for slot in (*SLOTS, *voter_slots(settings)[1:])}
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._clients: dict[tuple[str, str], openai.AsyncOpenAI] = {}
        for model in self.models.values():
            if (address := (model.url, model.key_variable)) not in self._clients:
                self._clients[address] = open_client(*address, "judge.*", settings.timeout_seconds)

    async def __aenter__(self) -> JudgeClient:
        network.use_own_threads()
        return self

    async def __aexit__(self, *exception: object) -> None:
        for client in self._clients.values():
            await client.close()

    async def complete(
        self, slot: str, body: Mapping[str, Any], images: int, deadline: float, spending: Spending
    ) -> Completion:
        """The reply to a request, which is repeated until the endpoint replies, but not beyond `deadline` (loop time).

        `body`: arguments of chat.completions, without the model; `images`: how many it contains. Raises RequestFailed,
        UnusableReply (a reply that is no chat completion) and BudgetSpent.
        """
        model = self.models[slot]
        try:
            async with asyncio.timeout_at(deadline), self._slots:
                return await self._send(model, {**body, "model": model.name}, images, spending)
        except TimeoutError:
            raise RequestFailed("deadline") from None

    async def _send(self, model: JudgeModel, body: dict[str, Any], images: int, spending: Spending) -> Completion:
        """Send within the budget; a request without a known cost keeps its estimate in the budget.

        Errors are raised without their cause, which holds the request and its key.
        """
        import openai

        prompt = _text_chars(body) // CHARS_PER_TOKEN + IMAGE_TOKENS * images
        actual = estimate = model.usage(1, prompt, next(body[name] for name in TOKEN_LIMITS if name in body))
        hour, calls = await self._meter.reserve(estimate), 1
        try:
            # Not chat.completions.create: its copy of a body with many screenshots costs more than all else here.
            reply = await self._clients[model.url, model.key_variable].post(
                "/chat/completions", cast_to=openai.HttpxBinaryResponseContent, body=body
            )
            calls += int(reply.response.request.headers.get(_RETRY_HEADER, 0))
            completion = _read(reply.content)
            if completion.tokens is not None:
                actual = model.usage(calls, *completion.tokens)
                spending.prompt_tokens += completion.tokens[0]
                spending.response_tokens += completion.tokens[1]
                spending.dollars += actual.dollars
            else:
                actual += Usage(calls - 1)
            return completion
        except openai.APITimeoutError:
            raise RequestFailed("timeout") from None
        except openai.APIConnectionError:
            raise RequestFailed("connection") from None
        except openai.APIStatusError as error:
            calls += int(error.request.headers.get(_RETRY_HEADER, 0))
            actual = Usage(calls)
            text = f"status {error.status_code}: {shorten(redact(' '.join(error.response.text.split())), 300)}"
            raise RequestFailed("refused_request", text) from None
        except openai.OpenAIError as error:
            raise UnusableReply("unparsable_response", type(error).__name__) from None
        finally:
            spending.calls += calls
            await self._meter.settle(hour, estimate, actual)


def _fault_log(url: str, settings: str, faults: list[str]) -> dict[str, list[Callable[..., Any]]]:
    """Hooks of an HTTP client that log each kind of fault of an endpoint once: its retries hide them."""

    def report(fault: str) -> None:
        if fault not in faults:
            faults.append(fault)
            log.warning("the endpoint %s (%s): %s (logged once)", url, settings, fault)

    async def on_request(request: Any) -> None:
        if request.headers.get(_RETRY_HEADER, "0") != "0":
            report("requests get no reply and are repeated")

    async def on_response(response: Any) -> None:
        if response.is_error:
            await response.aread()
            text = shorten(redact(" ".join(response.text.split())), 300)
            report(f"status {response.status_code}: {text}".removesuffix(": "))

    return {"request": [on_request], "response": [on_response]}


def _text_chars(body: Mapping[str, Any]) -> int:
    """Characters of a body's texts; a content is one text, or a list of texts and images."""
    contents = [message["content"] for message in body["messages"]]
    return sum(len(c) if isinstance(c, str) else sum(len(part.get("text", "")) for part in c) for c in contents)


def _read(content: bytes) -> Completion:
    """The reply. Raises UnusableReply for a response that is no chat completion with one choice."""
    try:
        found = json.loads(content)
        (choice,) = found["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        if choice["message"].get("refusal"):
            text, reason = str(choice["message"]["refusal"]), "content_filter"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UnusableReply("unparsable_response", redact(content.decode("utf-8", "replace"))) from None
    usage = found.get("usage")
    names = ("prompt_tokens", "completion_tokens")
    counts: list[Any] = [usage.get(name) for name in names] if isinstance(usage, dict) else []
    known = len(counts) == 2 and all(type(count) is int and 0 <= count <= MAX_TOKEN_COUNT for count in counts)
    return Completion(
        redact(text) if isinstance(text, str) else "",
        reason if isinstance(reason, str) else None,
        (counts[0], counts[1]) if known else None,
    )
