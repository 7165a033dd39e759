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

from megatron_webrl.farm.auth_middleware import AuthMiddleware
from megatron_webrl.farm.metrics import CONTENT_TYPE
from megatron_webrl.farm.protocol import API_PREFIX, TOKEN_VARIABLE, ErrorResponse, dump
from megatron_webrl.farm.protocol import STATUS_BUSY as BUSY_STATUS

log = logging.getLogger(__name__)

JSON_MEDIA_TYPE = "application/json"
RETRY_AFTER_SECONDS = 1  # after which a busy farm is asked again

Responses = dict[int | str, dict[str, Any]]

COMMON_RESPONSES: Responses = {
    400: {"model": ErrorResponse, "description": "Bad input; the error names the field"},
    401: {"model": ErrorResponse, "description": "The token is missing or wrong"},
    403: {
        "model": ErrorResponse,
        "description": "Without a token: asked for by another name than loopback, or by a page",
    },
    413: {"model": ErrorResponse, "description": "The body is too long"},
}
"""What any path under PREFIX may answer."""

BUSY_RESPONSE = {
    "model": ErrorResponse, "description": "Every session is leased",
    "headers": {"Retry-After": {"description": "Seconds to wait before asking again", "schema": {"type": "integer"}}},
}  # fmt: skip


def make_app(title: str, description: str, token: str | None, body_limits: Mapping[str, int] | None = None) -> FastAPI:
    """An application that answers every error as `wire.Error`, guarded by the token."""
    # The pages of documentation that FastAPI serves load scripts from elsewhere.
    app = FastAPI(
        title=title, description=description, version=API_PREFIX.removeprefix("/v"), docs_url=None, redoc_url=None
    )
    app.add_middleware(AuthMiddleware, token=token, body_limits=body_limits or {})
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    app.openapi = lambda: _openapi(app, token is not None)  # type: ignore[method-assign]
    return app


def add_public_routes(
    app: FastAPI,
    health_problem: Callable[[], Awaitable[str | None]],
    metrics: Callable[[], bytes],
    page: Callable[[], str],
) -> None:
    """The paths that need no token. `check` says what is wrong, if something is."""

    @app.get("/healthz", response_class=PlainTextResponse, responses={503: {"description": "What is wrong"}})
    async def health() -> Response:
        """Whether sessions can be had here."""
        wrong = await health_problem()
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


def error_response(
    status: int, message: str, outcome: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """A refusal."""
    return Response(dump(ErrorResponse(message, outcome)), status, headers, media_type=JSON_MEDIA_TYPE)


def busy_response(message: str) -> Response:
    """Ask again later."""
    return error_response(503, message, headers={"Retry-After": str(RETRY_AFTER_SECONDS)})


def json_response(value: Any, status: int = 200) -> Response:
    """A dataclass as JSON."""
    return Response(dump(value), status, media_type=JSON_MEDIA_TYPE)


def add_error_statuses(app: FastAPI, statuses: Mapping[type[Exception], int]) -> None:
    """Answer exceptions whose message is one sentence by a status."""

    async def refuse(request: Request, error: Exception) -> Response:
        status = next(statuses[kind] for kind in type(error).__mro__ if kind in statuses)
        return busy_response(str(error)) if status == BUSY_STATUS else error_response(status, str(error))

    for kind in statuses:
        app.add_exception_handler(kind, refuse)


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:] if first["type"] != "json_invalid") or "body"
    reason = "is not JSON" if first["type"] == "json_invalid" else first["msg"]
    return error_response(400, f"{place}: {reason}")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(
        error.status_code, f"{request.method} {request.url.path}: {error.detail}", headers=error.headers
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    log.error("%s failed", request.method, exc_info=error)
    return error_response(500, f"{type(error).__name__} on the server; its log tells more")


def _openapi(app: FastAPI, needs_token: bool) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        for path, operations in schema["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)  # answered as 400
                if needs_token and path.startswith(API_PREFIX):
                    operation["security"] = [{"token": []}]
        schemas = schema["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schema["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer", "description": f"What {TOKEN_VARIABLE} holds on the server"}
        }
        app.openapi_schema = schema
    return app.openapi_schema
