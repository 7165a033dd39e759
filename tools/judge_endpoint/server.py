"""The HTTP server: /v1/chat/completions, /v1/models, /stats."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tools.judge_endpoint.chat import (
    REASON,
    ChatQuestion,
    NotAQuestion,
    QuestionReader,
    completion,
    faulty_reply,
    right_reply,
)
from tools.judge_endpoint.faults import FaultPlan
from tools.judge_endpoint.oracle import Oracle

MODEL = "oracle"
MAX_BODY_BYTES = 256 * 2**20
SLOW_FACTOR = 10.0
LOWEST_SLOW_SECONDS = 0.2


@dataclass(frozen=True)
class EndpointOptions:
    """What an endpoint does."""

    oracle: Oracle
    faults: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    latency: float = 0.0  # seconds of a response
    retry_after: float = 1.0  # seconds, with status 429
    schemas: bool = True  # without: response_format is refused with status 400
    echo: bool = False  # quote all data of a question in the reason, as a gullible model does
    key: str = ""  # required bearer token; empty: none


class Endpoint:
    """Answers requests and counts them."""

    def __init__(self, options: EndpointOptions) -> None:
        """Raises ConfigError for missing prompt files."""
        self._options, self._reader = options, QuestionReader("configs/judge")
        self.plan = FaultPlan(options.faults, options.seed)
        self.requests, self.replies, self.in_flight, self.most_in_flight = 0, Counter[str](), 0, 0
        self._released = asyncio.Event()

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/stats", self._stats)
        app.on_shutdown.append(self._release)
        return app

    def stats(self) -> dict[str, Any]:
        """Requests, right replies by stage, faults by kind."""
        return {
            "requests": self.requests, "replies": dict(self.replies), "faults": dict(self.plan.counts),
            "most_in_flight": self.most_in_flight,
        }  # fmt: skip

    async def _release(self, app: web.Application) -> None:
        self._released.set()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _stats(self, request: web.Request) -> web.Response:
        return web.json_response(self.stats())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await self._respond(request)
        finally:
            self.in_flight -= 1

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        options, sent = self._options, request.headers.get("Authorization", "")
        if options.key and sent != f"Bearer {options.key}":
            return _error(401, f"Incorrect API key provided: {sent.removeprefix('Bearer ')}")
        try:
            body = json.loads(await request.read())
            if "response_format" in body and not options.schemas:
                return _error(400, "Unknown parameter: 'response_format'")
            question = self._reader.read(body)
        except (NotAQuestion, ValueError, TypeError) as error:
            return _error(400, f"this endpoint only answers the judge's questions: {error}")
        fault = self.plan.draw(question.digest)
        await asyncio.sleep(options.latency)
        if fault == "slow":
            await asyncio.sleep(max(options.latency * (SLOW_FACTOR - 1), LOWEST_SLOW_SECONDS))
            fault = None
        return await self._fail(request, question, fault) if fault else web.json_response(self._answer(question))

    def _decide(self, question: ChatQuestion) -> bool:
        if question.form == "key_points":
            return True
        return self._options.oracle.decide(question.stage, dict(question.fields), question.images)

    def _answer(self, question: ChatQuestion) -> dict[str, Any]:
        self.replies[question.stage] += 1
        reason = "\n".join([REASON, *question.fields.values()]) if self._options.echo else REASON
        return completion(question, right_reply(question, self._decide(question), reason), "stop")

    async def _fail(self, request: web.Request, question: ChatQuestion, fault: str) -> web.StreamResponse:
        if fault == "rate_limited":
            return _error(429, "Too many requests", {"Retry-After": f"{self._options.retry_after:g}"})
        if fault == "server_error":
            return _error(500, "The server had an error")
        if fault == "hang":
            await self._released.wait()
        if fault in ("hang", "dropped"):
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=500)
        if fault == "invalid_json":
            wrong = json.dumps(completion(question, right_reply(question, not self._decide(question)), "stop"))
            return web.Response(text=wrong[:-1], content_type="application/json")
        if fault == "no_choices":
            return web.json_response({"object": "chat.completion", "choices": []})
        return web.json_response(completion(question, *faulty_reply(question, self._decide(question), fault)))


@asynccontextmanager
async def serve_endpoint(options: EndpointOptions, port: int = 0) -> AsyncIterator[tuple[str, Endpoint]]:
    """Serve on loopback; yields the URL for judge.verdict.url, and the endpoint. Raises ConfigError, OSError."""
    endpoint = Endpoint(options)
    runner = web.AppRunner(endpoint.application(), shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1", endpoint
    finally:
        await runner.cleanup()


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    error = {"error": {"message": message, "type": "error", "code": status}}
    return web.json_response(error, status=status, headers=headers)
