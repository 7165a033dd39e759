"""HTTP API and status page of a browser server. Errors are `ErrorResponse`."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from html import escape
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.browser_server import BrowserServer, RequestRefused, WaitForDisconnect
from megatron_webrl.browser.server.metrics import CONTENT_TYPE
from megatron_webrl.browser.server.protocol import API_PREFIX, ErrorResponse, InvalidRequest
from megatron_webrl.control.http.access import AuthMiddleware, Token
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.types import Action, Observation
from megatron_webrl.util.image_type import IMAGE_TYPES, image_type

log = logging.getLogger(__name__)

CLIENT = "client"  # role of a token
RETRY_AFTER_SECONDS = 1  # value of Retry-After while every session is leased
REFRESH_SECONDS = 2  # of the status page
Responses = dict[int | str, dict[str, Any]]

DESCRIPTION = (
    "Browser sessions by lease. Each operation and renewal restarts the lease's lifetime; GET of the lease does not. "
    "Observations are JSON without the screenshot, or, if the request accepts "
    f"{protocol.OBSERVATION_MEDIA_TYPE}, length of the JSON (uint32, little endian), JSON, image."
)


def _error(text: str) -> dict[str, Any]:
    return {"model": ErrorResponse, "description": text}


COMMON_RESPONSES: Responses = {  # of every path under API_PREFIX
    400: _error("Invalid request; the error names the field"),
    401: _error("The token is missing or wrong"),
    403: _error("Without a token of the server: Host or Origin is not this machine's"),
    404: _error("No such path; of a demonstration: the environment has no scripted policy"),
    409: _error("There is no episode, another operation is running, or the scripted policy failed"),
    410: _error("The lease is unknown or has ended"),
    413: _error("The body is too large"),
    502: _error("The browser failed, outcome names the failure; the episode has ended"),
    503: _error("Every session is leased; retry after Retry-After seconds"),
    "4XX": _error("Other invalid requests"),  # in place of FastAPI's own 422, which is answered as 400
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_OBSERVATION: Responses = {
    200: {
        "model": Observation, "description": "The observation", "content": {protocol.OBSERVATION_MEDIA_TYPE: _BINARY}
    }
}  # fmt: skip
_IMAGE: Responses = {
    200: {"description": "The latest screenshot", "content": dict.fromkeys(IMAGE_TYPES.values(), _BINARY)}
}


def server_app(server: BrowserServer, token: Token | None) -> FastAPI:
    """The ASGI application of a browser server, behind its clients' token."""
    # FastAPI's documentation pages load scripts from other hosts.
    app = FastAPI(
        title="webrl browsers", description=DESCRIPTION, version=API_PREFIX.removeprefix("/v"),
        docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.add_middleware(
        AuthMiddleware, token=token, is_open=lambda path: not f"{path}/".startswith(f"{API_PREFIX}/"),
        error_body=lambda message: protocol.dump(ErrorResponse(message)),
    )  # fmt: skip
    app.add_exception_handler(RequestValidationError, _invalid)
    for kind in (RequestRefused, InvalidRequest, ScriptedPolicyError, BrowserError, HTTPException, Exception):
        app.add_exception_handler(kind, _failed)
    routes = APIRouter(prefix=API_PREFIX, responses=COMMON_RESPONSES)
    if token is not None:  # the middleware checks it; this documents it
        value = f"The value of {token.variable}"
        routes.dependencies.append(Depends(HTTPBearer(scheme_name=CLIENT, description=value, auto_error=False)))
    _add_protected(routes, server)
    app.include_router(routes)
    _add_public(app, server)
    return app


def _add_protected(routes: APIRouter, server: BrowserServer) -> None:
    @routes.post("/leases", status_code=201)
    async def lease(body: Annotated[protocol.LeaseRequest, Body()]) -> protocol.Lease:
        """Lease a session."""
        return server.create_lease(body)

    @routes.get("/leases/{lease}")
    async def look(lease: str) -> protocol.LeaseState:
        """State of a lease: state, task, page, steps, time left, refused requests."""
        return server.find_lease(lease).describe()

    @routes.post("/leases/{lease}/renew")
    async def renew(lease: str) -> protocol.Lease:
        """Restart the lease's lifetime."""
        return server.renew_lease(lease)

    @routes.delete("/leases/{lease}", status_code=204)
    async def release(lease: str) -> None:
        """End a lease and its episode."""
        await server.release_lease(lease)

    @routes.get("/tasks")
    async def tasks() -> protocol.TaskList:
        """Available environments by source."""
        return protocol.TaskList(server.catalog.environments)

    @routes.get("/state")
    async def state() -> protocol.ServerState:
        """State of the server."""
        return server.state()

    @routes.post("/leases/{lease}/reset", responses=_OBSERVATION)
    async def reset(lease: str, body: Annotated[protocol.ResetRequest, Body()], request: Request) -> Response:
        """Open a task in a fresh browser context; ends the current episode."""
        return _observation(request, await server.reset(lease, body, _disconnected(request)))

    @routes.post("/leases/{lease}/step", responses=_OBSERVATION)
    async def step(lease: str, action: Annotated[protocol.StepRequest, Body()], request: Request) -> Response:
        """Execute an action and wait until the page is idle."""
        return _observation(request, await server.step(lease, action, _disconnected(request)))

    @routes.get("/leases/{lease}/screenshot", response_class=Response, responses=_IMAGE)
    async def screenshot(lease: str) -> Response:
        """The latest screenshot of the episode."""
        image = server.latest_observation(lease).screenshot
        return Response(image, media_type=image_type(image), headers={"Cache-Control": "no-store"})

    @routes.get("/leases/{lease}/demonstration")
    async def demonstration(lease: str, request: Request, premature_submit: bool = False) -> Action:
        """The next action of the scripted policy, or of one that submits too early."""
        return await server.demonstration(lease, premature_submit, _disconnected(request))


def _add_public(app: FastAPI, server: BrowserServer) -> None:
    """Add the paths that need no token."""

    @app.get("/healthz", response_class=PlainTextResponse, responses={503: {"description": "The reason"}})
    async def health() -> Response:
        """Whether the server can provide sessions."""
        problem = await server.pool.health_problem()
        return PlainTextResponse(f"{problem or 'ok'}\n", 200 if problem is None else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Prometheus metrics."""
        return Response(await run_in_threadpool(server.metrics.render), media_type=CONTENT_TYPE)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def status_page() -> Response:
        """Status page."""
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(
            _status_page(server), headers={"Content-Security-Policy": policy, "Cache-Control": "no-store"}
        )


def _observation(request: Request, observation: Observation) -> Response:
    if protocol.OBSERVATION_MEDIA_TYPE in request.headers.get("accept", ""):
        return Response(protocol.encode_observation(observation), media_type=protocol.OBSERVATION_MEDIA_TYPE)
    return Response(protocol.dump(observation), media_type="application/json")


def _disconnected(request: Request) -> WaitForDisconnect:
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return disconnected


async def _failed(request: Request, error: Exception) -> Response:
    """The response to an exception, whose message is one sentence for the client."""
    status, message, outcome = 500, str(error), None
    headers: Mapping[str, str] | None = None
    if isinstance(error, RequestRefused):
        status = error.status
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == protocol.STATUS_BUSY else None
    elif isinstance(error, InvalidRequest):
        status = 400
    elif isinstance(error, ScriptedPolicyError):
        status = protocol.STATUS_CONFLICT
    elif isinstance(error, BrowserError):
        status, outcome = protocol.STATUS_BROWSER_FAILED, error.outcome
    elif isinstance(error, HTTPException):
        status, headers = error.status_code, error.headers
        message = f"{request.method} {request.url.path}: {error.detail}"
    else:
        log.error("%s failed", request.method, exc_info=error)
        message = f"{type(error).__name__} on the server; see its log"
    return Response(protocol.dump(ErrorResponse(message, outcome)), status, headers, media_type="application/json")


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location = ".".join(str(part) for part in first["loc"][1:] if first["type"] != "json_invalid") or "body"
    reason = "is not JSON" if first["type"] == "json_invalid" else first["msg"]
    return await _failed(request, InvalidRequest(f"{location}: {reason}"))


# Status page: plain HTML without scripts or external resources

_STYLE = "body{font:14px/1.5 sans-serif;margin:2em;color:#222}td{padding:.25em .75em;border-bottom:1px solid #ddd}"


def _status_page(server: BrowserServer) -> str:
    """Sessions of a browser server. Needs no token, so it shows neither lease ids nor page addresses."""
    rows: list[Sequence[str]] = [("session", "state", "owner", "task", "steps", "failure", "expires in")]
    for number, lease in enumerate(server.active_leases(), 1):
        state = "waiting for the client" if lease.state == "waiting" else lease.state
        task = f"{lease.task.source}/{lease.task.environment}" if lease.task else ""
        left = f"{lease.seconds_left:.0f} s"
        rows.append((str(number), state, lease.owner, task, str(lease.steps), lease.outcome or "", left))
    table = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    text = f"{len(rows) - 1} of {server.sessions} sessions leased. Clients reach this server at {server.url}."
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
        f"<title>Browser server</title><style>{_STYLE}</style><h1>Browser server</h1><p>{escape(text)}</p>"
        f"<table>{table}</table><p>{escape(DESCRIPTION)} "
        '<a href="/openapi.json">Paths</a>, <a href="/metrics">metrics</a>, <a href="/healthz">health</a></p></html>'
    )
