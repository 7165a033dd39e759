"""A router over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, FastAPI, Request
from starlette.responses import Response

from megatron_webrl.farm import wire
from megatron_webrl.farm.api import BUSY, EVERYWHERE, Responses, add_outside, add_refusals, answer, make_app
from megatron_webrl.farm.leases import NoPlace, NotHeld
from megatron_webrl.farm.opening import BadInput
from megatron_webrl.farm.page import router_page
from megatron_webrl.farm.router import Router, Unsettled
from megatron_webrl.farm.wire import PREFIX, Error

DESCRIPTION = (
    "Leases of browser sessions on many nodes. Requests about a lease are sent on, by status 307, to the node that "
    "holds it; its address is in the lease, so a client need not ask twice."
)
STATE_BYTES = 2**20  # of an announcement, which lists leases and environments
_SENT_ON: Responses = {
    307: {
        "description": "To the node that holds the lease",
        "headers": {"Location": {"description": "The same path there", "schema": {"type": "string", "format": "uri"}}},
    },
    410: {"model": Error, "description": "The lease's node is dead or not known"},
    503: {**BUSY, "description": "The router has just started and does not know the lease's node yet"},
}


def router_app(router: Router, token: str | None) -> FastAPI:
    """The application of a router."""
    app = make_app("webrl browsers, router", DESCRIPTION, token, {f"{PREFIX}/nodes": STATE_BYTES})
    add_refusals(app, {NotHeld: wire.EXPIRED, BadInput: 400, NoPlace: wire.BUSY, Unsettled: wire.BUSY})
    routes = APIRouter(prefix=PREFIX, responses=EVERYWHERE)

    @routes.post("/leases", status_code=201, response_model=wire.Lease, responses={503: BUSY})
    async def lease(asked: Annotated[wire.LeaseRequest, Body()]) -> Response:
        """Lease a session on the node with the most free ones."""
        return answer(await router.place(asked), 201)

    @routes.post("/nodes", status_code=204)
    async def announce(state: Annotated[wire.NodeState, Body()]) -> Response:
        """A node says that it is there."""
        router.announce(state)
        return Response(status_code=204)

    @routes.get("/state", response_model=wire.RouterState)
    async def state() -> Response:
        """Nodes, free places and leases."""
        return answer(router.state())

    @routes.get("/tasks", response_model=wire.Tasks)
    async def tasks() -> Response:
        """What some node can open: environments by source."""
        return answer(wire.Tasks(router.environments()))

    _add_redirects(routes, router)
    app.include_router(routes)
    add_outside(app, router.check, router.measures.text, lambda: router_page(router, app.openapi()))
    return app


def _add_redirects(routes: APIRouter, router: Router) -> None:
    def send_on(lease: str, request: Request) -> Response:
        node = router.node_of(lease)
        router.measures.sent_on.inc()
        query = f"?{request.url.query}" if request.url.query else ""
        return Response(status_code=307, headers={"Location": f"{node}{request.scope['raw_path'].decode()}{query}"})

    @routes.get("/leases/{lease}", status_code=307, responses=_SENT_ON)
    async def look(lease: str, request: Request) -> Response:
        """What is known of a lease: ask its node."""
        return send_on(lease, request)

    @routes.delete("/leases/{lease}", status_code=307, responses=_SENT_ON)
    async def release(lease: str, request: Request) -> Response:
        """End a lease: at its node."""
        return send_on(lease, request)

    @routes.get("/leases/{lease}/{what}", status_code=307, responses=_SENT_ON)
    async def fetch(lease: str, what: str, request: Request) -> Response:
        """Screenshot or demonstration: at the lease's node."""
        return send_on(lease, request)

    @routes.post("/leases/{lease}/{operation}", status_code=307, responses=_SENT_ON)
    async def operate(lease: str, operation: str, request: Request) -> Response:
        """Reset, step or renew: at the lease's node."""
        return send_on(lease, request)
