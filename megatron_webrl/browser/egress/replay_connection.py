"""One connection from a browser to the egress proxy during replay: recordings answer its requests.

Tunnels end here: the browser accepts the proxy's certificate, so that requests over TLS are answered too.
"""

from __future__ import annotations

import asyncio
import ssl

from megatron_webrl.browser.egress.egress_policy import EgressDenied, parse_endpoint, split_url
from megatron_webrl.browser.egress.har_archive import FAILED_STATUS
from megatron_webrl.browser.egress.har_replayer import ReplayedResponse, ReplayRequest
from megatron_webrl.browser.egress.http1 import (
    BUFFER_BYTES,
    CHUNKED,
    HTTPHead,
    MalformedHTTP,
    encode_error_page,
    encode_head,
    iter_body,
    read_head,
    request_body_length,
)
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
        self._reader, self._writer = reader, writer

    async def run(self) -> None:
        """Serve requests until the connection closes."""
        task = asyncio.current_task()
        assert task is not None
        self._network.connections.add(task)
        try:
            await self._serve("")
        except (
            ConnectionError,
            MalformedHTTP,
            TimeoutError,
            asyncio.CancelledError,
        ):  # only cancelled to end this task
            self._writer.transport.abort()
        finally:
            self._network.connections.discard(task)
            self._writer.close()

    async def _serve(self, origin: str) -> None:
        """`origin`: scheme and authority of the requests within a tunnel; without one, requests name theirs."""
        while True:
            async with asyncio.timeout(IDLE_SECONDS):
                head = await read_head(self._reader)
            if head is None:
                return
            method, target = head.parse_request_line()
            if method == "CONNECT" and not origin:
                await self._open_tunnel(target)
                return
            async with asyncio.timeout(REQUEST_SECONDS):
                if not await self._answer(method, origin + target, head):
                    return

    async def _open_tunnel(self, target: str) -> None:
        try:
            endpoint = parse_endpoint(target)
        except EgressDenied as refused:
            await self._refuse("", refused)
            return
        self._writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            await self._writer.start_tls(self._tls)
        except ssl.SSLError as error:
            if error.reason in ("HTTP_REQUEST", "WRONG_VERSION_NUMBER"):  # a WebSocket without TLS
                self._network.record_refusal(endpoint.host, _not_recorded("WebSocket", f"ws://{endpoint}"))
            raise ConnectionError(str(error)) from error
        await self._serve(f"https://{str(endpoint).removesuffix(':443')}")

    async def _answer(self, method: str, url: str, head: HTTPHead) -> bool:
        """Answer a request; returns whether another may follow."""
        host, keep_alive = "", "close" not in head.header_values("connection")
        try:
            host = split_url(url)[1].host
            response = await self._response(method, url, head)
            self._network.count_bytes(len(response.body))
        except EgressDenied as refused:
            return await self._refuse(host, refused) and keep_alive
        except NotRecorded as error:
            return await self._refuse(host, EgressDenied(NOT_RECORDED, str(error))) and keep_alive
        if response.given_up:
            await self._hold(response)
            return False
        if response.status == FAILED_STATUS:
            raise ConnectionError("the recorded request failed")
        await self._send(method, response)
        return keep_alive

    async def _response(self, method: str, url: str, head: HTTPHead) -> ReplayedResponse:
        """The response to a request. Raises EgressDenied, NotRecorded."""
        network = self._network
        network.count_connection()
        network.count_request()
        network.count_bytes(head.size)
        request = await self._read_request(method, url, head)
        response = None if network.replayer is None else await network.replayer.find(request)
        if response is not None:
            network.count_replayed()
        elif (response := _preflight_response(method, head)) is None:
            network.unrecorded_urls.add(url)
            raise _not_recorded("WebSocket" if "websocket" in head.header_values("upgrade") else method, url)
        return response

    async def _read_request(self, method: str, url: str, head: HTTPHead) -> ReplayRequest:
        length, pieces = request_body_length(head), []
        if length == CHUNKED:  # browsers stream bodies over HTTP/2 only
            raise MalformedHTTP("a request body of unknown length")
        async for piece in iter_body(self._reader, length):
            self._network.count_bytes(len(piece))
            pieces.append(piece)
        fields = {name.lower(): value for name, value in head.headers}
        return ReplayRequest(method, url, fields.get("content-type", ""), b"".join(pieces), fields.get("range", ""))

    async def _send(self, method: str, response: ReplayedResponse) -> None:
        bodiless = method == "HEAD" or response.status in (204, 304)
        length = [] if bodiless else [("Content-Length", str(len(response.body)))]
        self._writer.write(_encode_head(response, length) + (b"" if bodiless else response.body))
        await self._writer.drain()

    async def _hold(self, response: ReplayedResponse) -> None:
        """Send what came before the page gave up, and wait until it gives up again, REQUEST_SECONDS at most."""
        if response.status != FAILED_STATUS:
            self._writer.write(_encode_head(response, [("Transfer-Encoding", "chunked")]))
        while await self._reader.read(BUFFER_BYTES):
            pass

    async def _refuse(self, host: str, refused: EgressDenied) -> bool:
        self._network.record_refusal(host, refused)
        if refused.reason in ("requests", "bytes"):
            await asyncio.sleep(THROTTLE_SECONDS)
        self._writer.write(encode_error_page(403, "Forbidden", str(refused)))
        await self._writer.drain()
        return refused.reason == NOT_RECORDED  # otherwise part of the request may be unread


def _encode_head(response: ReplayedResponse, framing: list[tuple[str, str]]) -> bytes:
    return encode_head(f"HTTP/1.1 {response.status} {response.reason}".rstrip(), [*response.headers, *framing])


def _not_recorded(kind: str, url: str) -> EgressDenied:
    return EgressDenied(NOT_RECORDED, f"{kind} {shorten(url, MAX_URL)} was not recorded (browser.replay)")


def _preflight_response(method: str, head: HTTPHead) -> ReplayedResponse | None:
    """The permission that a page of another origin asks for; browsers ask on their own, and HAR omits it."""
    fields = {name.lower(): value for name, value in head.headers}
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
