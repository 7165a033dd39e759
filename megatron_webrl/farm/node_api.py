"""A node over HTTP."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request
from starlette.responses import Response

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.farm import wire
from megatron_webrl.farm.api import (
    BUSY,
    EVERYWHERE,
    JSON,
    Responses,
    add_outside,
    add_refusals,
    answer,
    failure,
    make_app,
)
from megatron_webrl.farm.leases import NoPlace, NotHeld
from megatron_webrl.farm.node import Conflict, Gone, Node, NoScript
from megatron_webrl.farm.opening import BadInput
from megatron_webrl.farm.page import node_page
from megatron_webrl.farm.room import NoEpisode
from megatron_webrl.farm.wire import PREFIX, Error
from megatron_webrl.tasks.aim import OracleError
from megatron_webrl.types import Action, Observation

DESCRIPTION = (
    "Browser sessions by lease. Whatever is done with a lease, and each renewal, begins its lifetime anew; "
    "to look at it does not. "
    f"Observations come as JSON without the screenshot, or, where the request accepts {wire.FRAME}, as a frame: the "
    "length of the JSON (uint32, little endian), the JSON, the image."
)
_ENDED: Responses = {410: {"model": Error, "description": "The lease is not or no longer held"}}
_CONFLICT: Responses = {409: {"model": Error, "description": "No episode runs, or another operation does"}}
_FAILED: Responses = {
    502: {"model": Error, "description": "The browser failed, outcome names how; the episode is over"}
}
_OBSERVATION: Responses = {
    200: {
        "model": Observation, "description": "What the agent sees",
        "content": {wire.FRAME: {"schema": {"type": "string", "format": "binary"}}},
    }
}  # fmt: skip
_IMAGES = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"RIFF": "image/webp"}  # by their first bytes


def node_app(node: Node, token: str | None) -> FastAPI:
    """The application of a node."""
    app = make_app("webrl browsers", DESCRIPTION, token)
    add_refusals(
        app,
        {NotHeld: wire.EXPIRED, NoPlace: wire.BUSY, NoEpisode: 409, Conflict: 409, OracleError: 409, NoScript: 404,
         BadInput: 400},
    )  # fmt: skip
    app.add_exception_handler(BrowserError, _browser_failed)
    _add_leases(routes := APIRouter(prefix=PREFIX, responses=EVERYWHERE), node)
    _add_episodes(routes, node)
    app.include_router(routes)
    add_outside(app, node.check, node.measures.text, lambda: node_page(node, app.openapi()))
    return app


def _add_leases(routes: APIRouter, node: Node) -> None:
    @routes.post("/leases", status_code=201, response_model=wire.Lease, responses={503: BUSY})
    async def lease(asked: Annotated[wire.LeaseRequest, Body()]) -> Response:
        """Lease a session."""
        return answer(node.lease(asked), 201)

    @routes.get("/leases/{lease}", response_model=wire.LeaseState, responses=_ENDED)
    async def look(lease: str) -> Response:
        """What is known of a lease: state, task, page, steps, time left, refused requests."""
        return answer(node.lease_state(lease))

    @routes.post("/leases/{lease}/renew", response_model=wire.Lease, responses=_ENDED)
    async def renew(lease: str) -> Response:
        """Begin the lease's lifetime anew."""
        return answer(node.renew(lease))

    @routes.delete("/leases/{lease}", status_code=204, responses=_ENDED)
    async def release(lease: str) -> Response:
        """End a lease, and its episode with it."""
        await node.release(lease)
        return Response(status_code=204)

    @routes.get("/tasks", response_model=wire.Tasks)
    async def tasks() -> Response:
        """What can be opened: environments by source."""
        return answer(wire.Tasks(node.catalogue.environments))

    @routes.get("/state", response_model=wire.NodeState)
    async def state() -> Response:
        """What the node says of itself."""
        return answer(node.state())


def _add_episodes(routes: APIRouter, node: Node) -> None:
    episode: Responses = {**_ENDED, **_CONFLICT, **_FAILED}

    @routes.post("/leases/{lease}/reset", responses={**_OBSERVATION, **episode})
    async def reset(lease: str, asked: Annotated[wire.Reset, Body()], request: Request) -> Response:
        """Open a task in a fresh browser context; an episode under way ends."""
        return _seen(request, await node.reset(lease, asked, _gone(request)))

    @routes.post("/leases/{lease}/step", responses={**_OBSERVATION, **episode})
    async def step(lease: str, action: Annotated[wire.Step, Body()], request: Request) -> Response:
        """Carry out an action, and wait until the page has come to rest."""
        return _seen(request, await node.step(lease, action, _gone(request)))

    images: dict[str, Any] = {kind: {"schema": {"type": "string", "format": "binary"}} for kind in _IMAGES.values()}

    @routes.get(
        "/leases/{lease}/screenshot", response_class=Response,
        responses={200: {"description": "The latest screenshot", "content": images}, **_ENDED, **_CONFLICT},
    )  # fmt: skip
    async def screenshot(lease: str) -> Response:
        """The latest screenshot of the episode."""
        image = node.latest(lease).screenshot
        kind = next(kind for head, kind in _IMAGES.items() if image.startswith(head))
        return Response(image, media_type=kind, headers={"Cache-Control": "no-store"})

    @routes.get(
        "/leases/{lease}/demonstration", response_model=Action,
        responses={404: {"model": Error, "description": "No script knows this environment"}, **episode},
    )  # fmt: skip
    async def demonstration(lease: str, request: Request, hasty: bool = False) -> Response:
        """What a script would do next, or one that submits too early; 409 also if it is at a loss."""
        return answer(await node.demonstration(lease, hasty, _gone(request)))


def _seen(request: Request, observation: Observation) -> Response:
    if wire.FRAME in request.headers.get("accept", ""):
        return Response(wire.frame(observation), media_type=wire.FRAME)
    return Response(wire.observation_json(observation), media_type=JSON)


def _gone(request: Request) -> Gone:
    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return gone


async def _browser_failed(request: Request, error: Exception) -> Response:
    assert isinstance(error, BrowserError)
    return failure(wire.BROWSER_FAILED, str(error), error.outcome)
