"""HTTP API of a browser server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request
from starlette.responses import Response

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.api import (
    BUSY_RESPONSE,
    COMMON_RESPONSES,
    JSON_MEDIA_TYPE,
    Responses,
    add_error_statuses,
    add_public_routes,
    error_response,
    json_response,
    make_app,
)
from megatron_webrl.browser.server.browser_server import (
    BrowserServer,
    NoScriptedPolicy,
    OperationConflict,
    WaitForDisconnect,
)
from megatron_webrl.browser.server.lease_session import NoEpisode
from megatron_webrl.browser.server.leases import LeaseExpired, NoCapacity
from megatron_webrl.browser.server.protocol import API_PREFIX, ErrorResponse, InvalidRequest
from megatron_webrl.browser.server.status_page import server_page
from megatron_webrl.control.http.tokens import Token
from megatron_webrl.tasks.click_target import ScriptedPolicyError
from megatron_webrl.types import Action, Observation
from megatron_webrl.util.image_type import IMAGE_TYPES, image_type

DESCRIPTION = (
    "Browser sessions by lease. Each operation and renewal restarts the lease's lifetime; GET of the lease does not. "
    "Observations are JSON without the screenshot, or, if the request accepts "
    f"{protocol.OBSERVATION_MEDIA_TYPE}, length of the JSON (uint32, little endian), JSON, image."
)
_ENDED: Responses = {410: {"model": ErrorResponse, "description": "The lease is unknown or has ended"}}
_CONFLICT: Responses = {
    409: {"model": ErrorResponse, "description": "There is no episode, or another operation is running"}
}
_FAILED: Responses = {
    502: {"model": ErrorResponse, "description": "The browser failed, outcome names the failure; the episode has ended"}
}
_OBSERVATION: Responses = {
    200: {
        "model": Observation, "description": "The observation",
        "content": {protocol.OBSERVATION_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
    }
}  # fmt: skip


def server_app(server: BrowserServer, tokens: Sequence[Token]) -> FastAPI:
    """The ASGI application of a browser server."""
    app = make_app("webrl browsers", DESCRIPTION, tokens)
    add_error_statuses(
        app,
        {
            LeaseExpired: protocol.STATUS_LEASE_EXPIRED, NoCapacity: protocol.STATUS_BUSY, NoEpisode: 409,
            OperationConflict: 409, ScriptedPolicyError: 409, NoScriptedPolicy: 404, InvalidRequest: 400,
        },
    )  # fmt: skip
    app.add_exception_handler(BrowserError, _browser_failed)
    _add_leases(routes := APIRouter(prefix=API_PREFIX, responses=COMMON_RESPONSES), server)
    _add_episodes(routes, server)
    app.include_router(routes)
    add_public_routes(app, server.health_problem, server.metrics.render, lambda: server_page(server, app.openapi()))
    return app


def _add_leases(routes: APIRouter, server: BrowserServer) -> None:
    @routes.post("/leases", status_code=201, response_model=protocol.Lease, responses={503: BUSY_RESPONSE})
    async def lease(body: Annotated[protocol.LeaseRequest, Body()]) -> Response:
        """Lease a session."""
        return json_response(server.create_lease(body), 201)

    @routes.get("/leases/{lease}", response_model=protocol.LeaseState, responses=_ENDED)
    async def look(lease: str) -> Response:
        """State of a lease: state, task, page, steps, time left, refused requests."""
        return json_response(server.lease_state(lease))

    @routes.post("/leases/{lease}/renew", response_model=protocol.Lease, responses=_ENDED)
    async def renew(lease: str) -> Response:
        """Restart the lease's lifetime."""
        return json_response(server.renew_lease(lease))

    @routes.delete("/leases/{lease}", status_code=204, responses=_ENDED)
    async def release(lease: str) -> Response:
        """End a lease and its episode."""
        await server.release_lease(lease)
        return Response(status_code=204)

    @routes.get("/tasks", response_model=protocol.TaskList)
    async def tasks() -> Response:
        """Available environments by source."""
        return json_response(protocol.TaskList(server.catalog.environments))

    @routes.get("/state", response_model=protocol.ServerState)
    async def state() -> Response:
        """State of the server."""
        return json_response(server.state())


def _add_episodes(routes: APIRouter, server: BrowserServer) -> None:
    episode: Responses = {**_ENDED, **_CONFLICT, **_FAILED}

    @routes.post("/leases/{lease}/reset", responses={**_OBSERVATION, **episode})
    async def reset(lease: str, body: Annotated[protocol.ResetRequest, Body()], request: Request) -> Response:
        """Open a task in a fresh browser context; ends the current episode."""
        return _observation(request, await server.reset(lease, body, _disconnected(request)))

    @routes.post("/leases/{lease}/step", responses={**_OBSERVATION, **episode})
    async def step(lease: str, action: Annotated[protocol.StepRequest, Body()], request: Request) -> Response:
        """Execute an action and wait until the page is idle."""
        return _observation(request, await server.step(lease, action, _disconnected(request)))

    images: dict[str, Any] = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in IMAGE_TYPES.values()}

    @routes.get(
        "/leases/{lease}/screenshot", response_class=Response,
        responses={200: {"description": "The latest screenshot", "content": images}, **_ENDED, **_CONFLICT},
    )  # fmt: skip
    async def screenshot(lease: str) -> Response:
        """The latest screenshot of the episode."""
        image = server.latest_observation(lease).screenshot
        return Response(image, media_type=image_type(image), headers={"Cache-Control": "no-store"})

    @routes.get(
        "/leases/{lease}/demonstration", response_model=Action,
        responses={404: {"model": ErrorResponse, "description": "The environment has no scripted policy"}, **episode},
    )  # fmt: skip
    async def demonstration(lease: str, request: Request, premature_submit: bool = False) -> Response:
        """The next action of the scripted policy, or of one that submits too early; 409 also if the policy fails."""
        return json_response(await server.demonstration(lease, premature_submit, _disconnected(request)))


def _observation(request: Request, observation: Observation) -> Response:
    if protocol.OBSERVATION_MEDIA_TYPE in request.headers.get("accept", ""):
        return Response(protocol.encode_observation(observation), media_type=protocol.OBSERVATION_MEDIA_TYPE)
    return Response(protocol.observation_json(observation), media_type=JSON_MEDIA_TYPE)


def _disconnected(request: Request) -> WaitForDisconnect:
    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return disconnected


async def _browser_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrowserError)
    return error_response(protocol.STATUS_BROWSER_FAILED, str(error), error.outcome)
