"""Servers of this process in the place of a teacher's: they answer by a function."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.teacher import Teacher

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    """The address of a server that answers every request by a function."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def reply(body: dict[str, Any], **changes: Any) -> web.Response:
    """vLLM's reply to a request, with the log-probability -number of each token."""
    tokens = body["token_ids"]
    rows = [None, *({str(t): {"logprob": -float(n)}} for n, t in enumerate(tokens[1:], 1))]
    return web.json_response({"prompt_token_ids": tokens, "prompt_logprobs": rows} | changes)


@asynccontextmanager
async def teacher(url: str, processor: Processor, seconds: float = 20.0) -> AsyncIterator[Teacher]:
    """A teacher whose server has not been checked."""
    settings = DistillationConfig(coefficient=1.0, url=url)
    async with Teacher(settings, processor, seconds) as made:
        yield made
