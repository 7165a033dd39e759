"""A router over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, FastAPI, Request
from starlette.responses import Response

from megatron_webrl.farm import protocol
from megatron_webrl.farm.api import (
    BUSY_RESPONSE,
    COMMON_RESPONSES,
    Responses,
    add_error_statuses,
    add_public_routes,
    json_response,
    make_app,
)
from megatron_webrl.farm.leases import LeaseExpired, NoCapacity
from megatron_webrl.farm.protocol import API_PREFIX, ErrorResponse
from megatron_webrl.farm.request_validation import InvalidRequest
from megatron_webrl.farm.router.router import Router, RouterStarting
from megatron_webrl.farm.status_page import router_page

DESCRIPTION = (
    "Leases of browser sessions on many nodes. Requests about a lease are sent on, by status 307, to the node that "
    "holds it; its address is in the lease, so a client need not ask twice."
)
MAX_REGISTRATION_BYTES = 2**20  # of an announcement, which lists leases and environments
_SENT_ON: Responses = {
    307: {
        "description": "To the node that holds the lease",
        "headers": {"Location": {"description": "The same path there", "schema": {"type": "string", "format": "uri"}}},
    },
    410: {"model": ErrorResponse, "description": "The lease's node is dead or not known"},
    503: {**BUSY_RESPONSE, "description": "The router has just started and does not know the lease's node yet"},
}


def router_app(router: Router, token: str | None) -> FastAPI:
    """The application of a router."""
    app = make_app("webrl browsers, router", DESCRIPTION, token, {f"{API_PREFIX}/servers": MAX_REGISTRATION_BYTES})
    add_error_statuses(
        app,
        {
            LeaseExpired: protocol.STATUS_LEASE_EXPIRED,
            InvalidRequest: 400,
            NoCapacity: protocol.STATUS_BUSY,
            RouterStarting: protocol.STATUS_BUSY,
        },
    )
    routes = APIRouter(prefix=API_PREFIX, responses=COMMON_RESPONSES)

    @routes.post("/leases", status_code=201, response_model=protocol.Lease, responses={503: BUSY_RESPONSE})
    async def lease(asked: Annotated[protocol.LeaseRequest, Body()]) -> Response:
        """Lease a session on the node with the most free ones."""
        return json_response(await router.place_lease(asked), 201)

    @routes.post("/servers", status_code=204)
    async def announce(state: Annotated[protocol.ServerState, Body()]) -> Response:
        """A node says that it is there."""
        router.register(state)
        return Response(status_code=204)

    @routes.get("/state", response_model=protocol.RouterState)
    async def state() -> Response:
        """Nodes, free places and leases."""
        return json_response(router.state())

    @routes.get("/tasks", response_model=protocol.TaskList)
    async def tasks() -> Response:
        """What some node can open: environments by source."""
        return json_response(protocol.TaskList(router.environments()))

    _add_redirects(routes, router)
    app.include_router(routes)
    add_public_routes(app, router.health_problem, router.metrics.render, lambda: router_page(router, app.openapi()))
    return app


def _add_redirects(routes: APIRouter, router: Router) -> None:
    def send_on(lease: str, request: Request) -> Response:
        node = router.server_of(lease)
        router.metrics.redirected_requests.inc()
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
