"""HTTP parts shared by browser server and router: errors as `ErrorResponse`, and a complete OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from megatron_webrl.browser.server.access import role_of
from megatron_webrl.browser.server.metrics import CONTENT_TYPE
from megatron_webrl.browser.server.protocol import API_PREFIX, STATUS_BUSY, ErrorResponse, dump
from megatron_webrl.control.http.auth_middleware import AuthMiddleware
from megatron_webrl.control.http.tokens import Token

log = logging.getLogger(__name__)

JSON_MEDIA_TYPE = "application/json"
T = TypeVar("T")
RETRY_AFTER_SECONDS = 1  # value of Retry-After while every session is leased

Responses = dict[int | str, dict[str, Any]]

COMMON_RESPONSES: Responses = {  # of every path under API_PREFIX
    400: {"model": ErrorResponse, "description": "Invalid request; the error names the field"},
    401: {"model": ErrorResponse, "description": "The token is missing or wrong"},
    403: {
        "model": ErrorResponse,
        "description": "The token is that of the other role; without tokens: Host or Origin is not this machine's",
    },
    413: {"model": ErrorResponse, "description": "The body is too large"},
}

BUSY_RESPONSE = {
    "model": ErrorResponse, "description": "Every session is leased",
    "headers": {"Retry-After": {"description": "Seconds until the next request", "schema": {"type": "integer"}}},
}  # fmt: skip


def make_app(
    title: str, description: str, tokens: Sequence[Token], body_limits: Mapping[str, int] | None = None
) -> FastAPI:
    """Application behind tokens; errors are `ErrorResponse`. `body_limits`: bytes by path, if not the default."""
    # FastAPI's documentation pages load scripts from other hosts.
    app = FastAPI(
        title=title, description=description, version=API_PREFIX.removeprefix("/v"), docs_url=None, redoc_url=None,
        openapi_url=None,
    )  # fmt: skip
    app.add_middleware(
        AuthMiddleware, tokens=tokens, role_of=role_of, body_limits=body_limits or {},
        error_body=lambda message: dump(ErrorResponse(message)),
    )  # fmt: skip
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: _openapi(app, tokens)  # type: ignore[method-assign]
    return app


def add_public_routes(
    app: FastAPI,
    health_problem: Callable[[], Coroutine[Any, Any, str | None]],
    metrics: Callable[[], bytes],
    page: Callable[[], str],
) -> None:
    """Add the paths that need no token: many requests at a time cost little more than one. `health_problem` returns
    None or why the server cannot work.
    """
    check, render = shared(health_problem), shared(lambda: run_in_threadpool(metrics))  # it inspects many processes
    document = b""

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        """The OpenAPI document, encoded once."""
        nonlocal document
        document = document or json.dumps(app.openapi()).encode()
        return Response(document, media_type=JSON_MEDIA_TYPE)

    @app.get("/healthz", response_class=PlainTextResponse, responses={503: {"description": "The reason"}})
    async def health() -> Response:
        """Whether the server can provide sessions."""
        problem = await check()
        return PlainTextResponse(f"{problem or 'ok'}\n", 200 if problem is None else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(await render(), media_type=CONTENT_TYPE)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def status_page() -> Response:
        """Status page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(page(), headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})


def shared(work: Callable[[], Coroutine[Any, Any, T]]) -> Callable[[], Awaitable[T]]:
    """The same function, but concurrent calls share one run."""
    running: asyncio.Task[T] | None = None

    async def call() -> T:
        nonlocal running
        if running is None or running.done():
            running = asyncio.get_running_loop().create_task(work())
        return await asyncio.shield(running)

    return call


def error_response(
    status: int, message: str, outcome: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An `ErrorResponse` with a status."""
    return Response(dump(ErrorResponse(message, outcome)), status, headers, media_type=JSON_MEDIA_TYPE)


def busy_response(message: str) -> Response:
    """Status 503 with Retry-After."""
    return error_response(503, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def json_response(value: Any, status: int = 200) -> Response:
    """A dataclass as a JSON response."""
    return Response(dump(value), status, media_type=JSON_MEDIA_TYPE)


def add_error_statuses(app: FastAPI, statuses: Mapping[type[Exception], int]) -> None:
    """Map exceptions whose message is one sentence to statuses."""

    async def refuse(request: Request, error: Exception) -> Response:
        status = next(statuses[kind] for kind in type(error).__mro__ if kind in statuses)
        return busy_response(str(error)) if status == STATUS_BUSY else error_response(status, str(error))

    for kind in statuses:
        app.add_exception_handler(kind, refuse)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"][1:] if first["type"] != "json_invalid") or "body"
    reason = "is not JSON" if first["type"] == "json_invalid" else first["msg"]
    return error_response(400, f"{location}: {reason}")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s failed", request.method, exc_info=error)
    return error_response(500, f"{type(error).__name__} on the server; see its log")


def _openapi(app: FastAPI, tokens: Sequence[Token]) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # answered as 400
                if tokens and (role := role_of(path)):
                    operation["security"] = [{role: []}]
        schemas = schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schema["components"]["securitySchemes"] = {
            token.role: {"type": "http", "scheme": "bearer", "description": f"The value of {token.variable}"}
            for token in tokens
        }
        app.openapi_schema = schema
    return app.openapi_schema
