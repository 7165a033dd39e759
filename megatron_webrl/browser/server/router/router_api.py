"""HTTP API of a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Body, FastAPI, Request
from starlette.responses import Response

from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.api import (
    BUSY_RESPONSE,
    COMMON_RESPONSES,
    Responses,
    add_error_statuses,
    add_public_routes,
    json_response,
    make_app,
)
from megatron_webrl.browser.server.leases import LeaseExpired, NoCapacity
from megatron_webrl.browser.server.protocol import API_PREFIX, ErrorResponse, InvalidRequest
from megatron_webrl.browser.server.router.router import Router, RouterStarting
from megatron_webrl.browser.server.status_page import router_page
from megatron_webrl.control.http.tokens import Token

DESCRIPTION = (
    "Leases of browser sessions on many servers. The router redirects requests about a lease (status 307) to the "
    "server of the lease, whose address is in the lease: a client may send them there directly."
)
MAX_REGISTRATION_BYTES = 2**20  # a heartbeat lists leases and environments
_REDIRECTED: Responses = {
    307: {
        "description": "To the server of the lease",
        "headers": {
            "Location": {"description": "The same path on that server", "schema": {"type": "string", "format": "uri"}}
        },
    },
    410: {"model": ErrorResponse, "description": "The server of the lease is dead or unknown"},
    503: {**BUSY_RESPONSE, "description": "The router has just started and does not know the server of the lease yet"},
}


def router_app(router: Router, tokens: Sequence[Token]) -> FastAPI:
    """The ASGI application of a router."""
    app = make_app("webrl browsers, router", DESCRIPTION, tokens, {f"{API_PREFIX}/servers": MAX_REGISTRATION_BYTES})
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
    async def lease(body: Annotated[protocol.LeaseRequest, Body()]) -> Response:
        """Lease a session of the server with the most free ones."""
        return json_response(await router.place_lease(body), 201)

    @routes.post("/servers", status_code=204)
    async def register(state: Annotated[protocol.ServerState, Body()]) -> Response:
        """Heartbeat of a browser server."""
        router.register(state)
        return Response(status_code=204)

    @routes.get("/state", response_model=protocol.RouterState)
    async def state() -> Response:
        """Servers, free sessions and leases."""
        return json_response(router.state())

    @routes.get("/tasks", response_model=protocol.TaskList)
    async def tasks() -> Response:
        """Environments of all live servers, by source."""
        return json_response(protocol.TaskList(router.environments()))

    _add_redirects(routes, router)
    app.include_router(routes)
    add_public_routes(app, router.health_problem, router.metrics.render, lambda: router_page(router, app.openapi()))
    return app


def _add_redirects(routes: APIRouter, router: Router) -> None:
    def redirect(lease: str, request: Request) -> Response:
        server = router.server_of(lease)
        router.metrics.redirected_requests.inc()
        query = f"?{request.url.query}" if request.url.query else ""
        return Response(status_code=307, headers={"Location": f"{server}{request.scope['raw_path'].decode()}{query}"})

    @routes.get("/leases/{lease}", status_code=307, responses=_REDIRECTED)
    async def look(lease: str, request: Request) -> Response:
        """State of a lease, on its server."""
        return redirect(lease, request)

    @routes.delete("/leases/{lease}", status_code=307, responses=_REDIRECTED)
    async def release(lease: str, request: Request) -> Response:
        """End a lease, on its server."""
        return redirect(lease, request)

    @routes.get("/leases/{lease}/{what}", status_code=307, responses=_REDIRECTED)
    async def fetch(lease: str, what: str, request: Request) -> Response:
        """Screenshot or demonstration, on the lease's server."""
        return redirect(lease, request)

    @routes.post("/leases/{lease}/{operation}", status_code=307, responses=_REDIRECTED)
    async def operate(lease: str, operation: str, request: Request) -> Response:
        """Reset, step or renewal, on the lease's server."""
        return redirect(lease, request)
