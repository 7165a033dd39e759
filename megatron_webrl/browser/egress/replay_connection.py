"""One connection from a browser to the egress proxy during replay: recordings answer its requests.

Tunnels end here: the browser accepts the proxy's certificate, so that requests over TLS are answered too.
"""

from __future__ import annotations

import asyncio
import ssl

import h11

from megatron_webrl.browser.egress.egress_policy import EgressDenied, parse_endpoint, split_url
from megatron_webrl.browser.egress.har_archive import FAILED_STATUS
from megatron_webrl.browser.egress.har_replayer import ReplayedResponse, ReplayRequest
from megatron_webrl.browser.egress.http1 import BUFFER_BYTES, HTTPStream, encode_headers, error_page, header_values
from megatron_webrl.browser.egress.network_access import NOT_RECORDED, NetworkAccess
from megatron_webrl.browser.egress.proxy_connection import IDLE_SECONDS, REQUEST_SECONDS, THROTTLE_SECONDS
from megatron_webrl.browser.errors import NotRecorded
from megatron_webrl.browser.page.step_messages import shorten

MAX_URL = 120  # characters of a URL in a message
PREFLIGHT_SECONDS = 600  # for which the browser need not ask again


class ReplayConnection:
    """Serves one connection until the browser closes it. It never connects anywhere.

    A request that was not recorded gets a page with one sentence, status 403; one that failed in the recording fails,
    and one that its page gave up there waits for the browser to give it up.
    """

    def __init__(
        self, network: NetworkAccess, tls: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """`tls`: the server's side, towards the browser."""
        self._network, self._tls = network, tls
        self._browser = HTTPStream(h11.SERVER, reader, writer, network.count_bytes)

    async def run(self) -> None:
        """Serve requests until the connection closes."""
        task = asyncio.current_task()
        assert task is not None
        self._network.connections.add(task)
        try:
            await self._serve("")
        except (
            ConnectionError,
            h11.ProtocolError,
            TimeoutError,
            asyncio.CancelledError,
        ):  # only cancelled to end this task
            self._browser.writer.transport.abort()
        finally:
            self._network.connections.discard(task)
            self._browser.writer.close()

    async def _serve(self, origin: str) -> None:
        """`origin`: scheme and authority of the requests within a tunnel; without one, requests name theirs."""
        while True:
            try:
                async with asyncio.timeout(IDLE_SECONDS):
                    request = await self._browser.receive()
            except EgressDenied as refused:  # the episode has used its bytes
                await self._refuse("", refused)
                return
            if not isinstance(request, h11.Request):
                return
            target = request.target.decode()
            if request.method == b"CONNECT" and not origin:
                await self._open_tunnel(target)
                return
            async with asyncio.timeout(REQUEST_SECONDS):
                await self._answer(request, origin + target)
            if not self._browser.next_message():
                return

    async def _open_tunnel(self, target: str) -> None:
        try:
            endpoint = parse_endpoint(target)
        except EgressDenied as refused:
            await self._refuse("", refused)
            return
        if not isinstance(await self._browser.receive(), h11.EndOfMessage):
            raise ConnectionError("a request for a tunnel with a body")
        await self._browser.send(h11.Response(status_code=200, reason="Connection established", headers=[]))
        reader, writer = self._browser.reader, self._browser.writer
        try:
            await writer.start_tls(self._tls)
        except ssl.SSLError as error:
            if error.reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER"):  # a WebSocket without TLS
                self._network.record_refusal(endpoint.host, _not_recorded("WebSocket", f"ws://{endpoint}"))
            raise ConnectionError(str(error)) from error
        self._browser = HTTPStream(h11.SERVER, reader, writer, self._network.count_bytes)
        await self._serve(f"https://{str(endpoint).removesuffix(':443')}")

    async def _answer(self, request: h11.Request, url: str) -> None:
        """Answer a request."""
        host = ""
        try:
            host = split_url(url)[1].host
            response = await self._response(request, url)
            self._network.count_bytes(len(response.body))
        except EgressDenied as refused:
            await self._refuse(host, refused)
        except NotRecorded as error:
            await self._refuse(host, EgressDenied(NOT_RECORDED, str(error)))
        else:
            if response.given_up:
                await self._hold(response)
            elif response.status == FAILED_STATUS:
                raise ConnectionError("the recorded request failed")
            else:
                length = [] if response.status in (204, 304) else [("Content-Length", str(len(response.body)))]
                headers = encode_headers([*response.headers, *length])
                await self._browser.respond(response.status, response.reason, headers, response.body)

    async def _response(self, request: h11.Request, url: str) -> ReplayedResponse:
        """The response to a request. Raises EgressDenied, NotRecorded."""
        network = self._network
        network.count_connection()
        network.count_request()
        fields = {name.decode(): value.decode("latin-1") for name, value in request.headers}
        method = request.method.decode()
        body = b"".join([piece async for piece in self._browser.receive_body()])
        recorded = ReplayRequest(method, url, fields.get("content-type", ""), body, fields.get("range", ""))
        response = None if network.replayer is None else await network.replayer.find(recorded)
        if response is not None:
            network.count_replayed()
        elif (response := _preflight_response(method, fields)) is None:
            network.unrecorded_urls.add(url)
            raise _not_recorded(
                "WebSocket" if "websocket" in header_values(request.headers, "upgrade") else method, url
            )
        return response

    async def _hold(self, response: ReplayedResponse) -> None:
        """Send what came before the page gave up, and wait until it gives up again, REQUEST_SECONDS at most."""
        if response.status != FAILED_STATUS:
            headers = encode_headers(response.headers)
            await self._browser.send(h11.Response(status_code=response.status, reason=response.reason, headers=headers))
        while await self._browser.reader.read(BUFFER_BYTES):
            pass

    async def _refuse(self, host: str, refused: EgressDenied) -> None:
        self._network.record_refusal(host, refused)
        if refused.reason in ("requests", "bytes"):
            await asyncio.sleep(THROTTLE_SECONDS)
        headers, text = error_page(str(refused))
        await self._browser.respond(403, "Forbidden", headers, text)


def _not_recorded(kind: str, url: str) -> EgressDenied:
    return EgressDenied(NOT_RECORDED, f"{kind} {shorten(url, MAX_URL)} was not recorded (browser.replay)")


def _preflight_response(method: str, fields: dict[str, str]) -> ReplayedResponse | None:
    """The permission that a page of another origin asks for; browsers ask on their own, and HAR omits it."""
    if method != "OPTIONS" or "access-control-request-method" not in fields:
        return None
    headers = (
        ("access-control-allow-origin", fields.get("origin", "*")),
        ("access-control-allow-credentials", "true"),
        ("access-control-allow-methods", fields["access-control-request-method"]),
        ("access-control-allow-headers", fields.get("access-control-request-headers", "*")),
        ("access-control-max-age", str(PREFLIGHT_SECONDS)),
    )
    return ReplayedResponse(204, "No Content", headers, b"")
