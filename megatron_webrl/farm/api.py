"""What the HTTP sides of node and router have in common: errors as `wire.Error`, and a complete OpenAPI document."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from megatron_webrl.farm.guard import Guard
from megatron_webrl.farm.measures import CONTENT_TYPE
from megatron_webrl.farm.wire import BUSY as BUSY_STATUS
from megatron_webrl.farm.wire import PREFIX, TOKEN_VARIABLE, Error, dump

log = logging.getLogger(__name__)

JSON = "application/json"
RETRY_SECONDS = 1  # after which a busy farm is asked again

Responses = dict[int | str, dict[str, Any]]

EVERYWHERE: Responses = {
    400: {"model": Error, "description": "Bad input; the error names the field"},
    401: {"model": Error, "description": "The token is missing or wrong"},
    403: {"model": Error, "description": "Without a token: asked for by another name than loopback, or by a page"},
    413: {"model": Error, "description": "The body is too long"},
}
"""What any path under PREFIX may answer."""

BUSY = {
    "model": Error, "description": "Every session is leased",
    "headers": {"Retry-After": {"description": "Seconds to wait before asking again", "schema": {"type": "integer"}}},
}  # fmt: skip


def make_app(title: str, description: str, token: str | None, limits: Mapping[str, int] | None = None) -> FastAPI:
    """An application that answers every error as `wire.Error`, guarded by the token."""
    # The pages of documentation that FastAPI serves load scripts from elsewhere.
    app = FastAPI(
        title=title, description=description, version=PREFIX.removeprefix("/v"), docs_url=None, redoc_url=None
    )
    app.add_middleware(Guard, token=token, limits=limits or {})
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: _openapi(app, token is not None)  # type: ignore[method-assign]
    return app


def add_outside(
    app: FastAPI, check: Callable[[], Awaitable[str | None]], metrics: Callable[[], bytes], page: Callable[[], str]
) -> None:
    """The paths that need no token. `check` says what is wrong, if something is."""

    @app.get("/healthz", response_class=PlainTextResponse, responses={503: {"description": "What is wrong"}})
    async def health() -> Response:
        """Whether sessions can be had here."""
        wrong = await check()
        return PlainTextResponse(f"{wrong or 'ok'}\n", 200 if wrong is None else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    def measures() -> Response:  # in a thread, for it looks at many processes
        """Prometheus metrics."""
        return Response(metrics(), media_type=CONTENT_TYPE)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def board() -> Response:
        """For people."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(page(), headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"})


def failure(
    status: int, sentence: str, outcome: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """A refusal."""
    return Response(dump(Error(sentence, outcome)), status, headers, media_type=JSON)


def busy(sentence: str) -> Response:
    """Ask again later."""
    return failure(503, sentence, headers={"Retry-After": str(RETRY_SECONDS)})


def answer(value: Any, status: int = 200) -> Response:
    """A dataclass as JSON."""
    return Response(dump(value), status, media_type=JSON)


def add_refusals(app: FastAPI, statuses: Mapping[type[Exception], int]) -> None:
    """Answer exceptions whose message is one sentence by a status."""

    async def refuse(request: Request, error: Exception) -> Response:
        status = next(statuses[kind] for kind in type(error).__mro__ if kind in statuses)
        return busy(str(error)) if status == BUSY_STATUS else failure(status, str(error))

    for kind in statuses:
        app.add_exception_handler(kind, refuse)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:] if first["type"] != "json_invalid") or "body"
    reason = "is not JSON" if first["type"] == "json_invalid" else first["msg"]
    return failure(400, f"{place}: {reason}")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return failure(error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s failed", request.method, exc_info=error)
    return failure(500, f"{type(error).__name__} on the server; its log tells more")


def _openapi(app: FastAPI, needs_token: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # answered as 400
                if needs_token and path.startswith(PREFIX):
                    operation["security"] = [{"token": []}]
        schemas = schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schema["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer", "description": f"What {TOKEN_VARIABLE} holds on the server"}
        }
        app.openapi_schema = schema
    return app.openapi_schema
