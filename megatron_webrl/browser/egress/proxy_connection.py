"""One connection from a browser to the egress proxy: forwarded requests, tunnels, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import h11

from megatron_webrl.browser.egress.egress_policy import EgressDenied, Endpoint, parse_endpoint, split_url
from megatron_webrl.browser.egress.http1 import (
    BUFFER_BYTES,
    FRAMING_HEADERS,
    UPGRADE,
    Headers,
    HTTPStream,
    end_to_end_headers,
    error_page,
    header_values,
)
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.errors import HostUnreachable
from megatron_webrl.util.text import shorten

REQUEST_SECONDS = 60.0  # for one plain HTTP request, from its head to the last byte of the response
IDLE_SECONDS = 120.0  # until an idle tunnel, or a connection without a request, is closed
THROTTLE_SECONDS = 0.3  # delay of a refusal beyond a quota: pages that retry in a loop must not busy the event loop
MAX_ERROR = 200  # characters of a message about malformed HTTP
LINGER_SECONDS = 2.0  # to read on after an error page, before the connection closes


@dataclass(frozen=True)
class UpstreamConnection:
    """An open connection to a server."""

    endpoint: Endpoint
    http: HTTPStream


class ProxyConnection:
    """Serves one connection until either side closes it.

    A refused request gets a page with one sentence. A request to an unreachable server gets no response, so that the
    browser reports it as it would without a proxy; a tunnel to one gets status 502.
    """

    def __init__(
        self, network: NetworkAccess, connect: Callable[[NetworkAccess, Endpoint], Awaitable[UpstreamConnection]],
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self._network, self._connect = network, connect
        self._browser = HTTPStream(h11.SERVER, reader, writer, network.count_bytes)
        self._upstream: UpstreamConnection | None = None
        self._reused = False  # the upstream connection has served an earlier request
        self._host = self._url = ""  # of the current request; no URL: a tunnel

    async def run(self) -> None:
        """Serve requests until the connection closes."""
        task = asyncio.current_task()
        assert task is not None
        self._network.connections.add(task)
        try:
            await self._serve()
        except (ConnectionError, h11.ProtocolError, asyncio.CancelledError):  # only cancelled to end this task
            self._browser.writer.transport.abort()
        finally:
            self._network.connections.discard(task)
            self._browser.writer.close()
            self._close_upstream()

    async def _serve(self) -> None:
        try:
            while await self._next():
                pass
        except EgressDenied as refused:
            self._network.record_refusal(self._host, refused)
            self._network.refused_urls.add(self._url)
            if refused.reason in ("requests", "bytes"):
                await asyncio.sleep(THROTTLE_SECONDS)
            await self._send_error_page(403, "Forbidden", str(refused))
        except HostUnreachable as error:
            self._network.record_error(self._host, str(error))
            self._browser.writer.transport.abort()
        except TimeoutError:
            self._network.record_error(self._host, f"a request took more than {REQUEST_SECONDS} s")
            self._browser.writer.transport.abort()

    async def _next(self) -> bool:
        """Serve the next request; returns whether another may follow."""
        self._host = self._url = ""
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                request = await self._browser.receive()
        except TimeoutError:
            return False
        except h11.RemoteProtocolError as error:
            await self._send_error_page(400, "Bad Request", f"the request is not understood: {_shown(error)}")
            return False
        if not isinstance(request, h11.Request):
            return False  # the browser has closed the connection
        self._network.count_connection()
        self._network.count_request()
        if request.method == b"CONNECT":
            await self._connect_through(request.target.decode())
            return False
        async with asyncio.timeout(REQUEST_SECONDS):
            self._url = request.target.decode()
            scheme, endpoint, path = split_url(self._url)
            self._host = endpoint.host
            if scheme not in ("http", "ws"):
                raise EgressDenied("scheme", f"{scheme}: needs a tunnel")
            upstream = await self._forward(request, endpoint, path)
        if self._browser.connection.our_state is h11.SWITCHED_PROTOCOL:
            await self._tunnel(upstream)
            return False
        if not upstream.http.next_message():
            self._close_upstream()
        return self._browser.next_message()

    async def _connect_through(self, target: str) -> None:
        endpoint = parse_endpoint(target)
        self._host = endpoint.host
        try:
            upstream = self._upstream = await self._connect(self._network, endpoint)
        except HostUnreachable as error:
            self._network.record_error(self._host, str(error))
            await self._send_error_page(502, "Bad Gateway", str(error))
            return
        if not isinstance(await self._browser.receive(), h11.EndOfMessage):
            raise ConnectionError("a request for a tunnel with a body")
        await self._browser.send(h11.Response(status_code=200, reason="Connection established", headers=[]))
        await self._tunnel(upstream)

    # Plain requests

    async def _forward(self, request: h11.Request, endpoint: Endpoint, path: str) -> UpstreamConnection:
        """Forward a request and its response; returns the connection to the server."""
        upgrade = UPGRADE if "websocket" in header_values(request.headers, "upgrade") else []
        fields = [field for field in end_to_end_headers(request) if field[0].lower() not in (b"host", b"expect")]
        host = str(endpoint).removesuffix(":80").encode()
        upstream = await self._upstream_for(endpoint)
        await upstream.http.send(
            h11.Request(method=request.method, target=path, headers=[(b"Host", host), *fields, *upgrade])
        )
        sending = asyncio.ensure_future(_relay_body(self._browser, upstream.http))
        responding = asyncio.ensure_future(self._relay_response(upstream))
        try:
            # A server may respond, and close the connection, before it has read the whole request.
            await asyncio.wait({sending, responding}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and isinstance(error := sending.exception(), EgressDenied | h11.ProtocolError):
                raise error
            await responding
            return upstream
        finally:
            for task in (sending, responding):
                task.cancel()
            await asyncio.gather(sending, responding, return_exceptions=True)

    async def _relay_response(self, upstream: UpstreamConnection) -> None:
        try:
            while isinstance(head := await upstream.http.receive(), h11.InformationalResponse):
                upgrade = UPGRADE if head.status_code == 101 else []
                await self._browser.send(_response(head, [*end_to_end_headers(head), *upgrade]))
                if upgrade:
                    return
        except h11.RemoteProtocolError as error:
            raise HostUnreachable(f"{upstream.endpoint} sent no valid HTTP: {_shown(error)}") from None
        if isinstance(head, h11.ConnectionClosed) and self._reused:
            raise ConnectionError("the server has closed an idle connection")  # browsers retry on their own
        if not isinstance(head, h11.Response):
            raise HostUnreachable(f"{upstream.endpoint} ended the connection without an answer")
        await self._browser.send(_response(head, end_to_end_headers(head)))
        await _relay_body(upstream.http, self._browser)

    async def _upstream_for(self, endpoint: Endpoint) -> UpstreamConnection:
        """The previous request's connection if it has the same endpoint and is open; else a new one."""
        upstream = self._upstream
        self._reused = upstream is not None and upstream.endpoint == endpoint and await upstream.http.is_silent()
        if upstream is None or not self._reused:
            self._close_upstream()
            upstream = self._upstream = await self._connect(self._network, endpoint)
        return upstream

    # Tunnels

    async def _tunnel(self, upstream: UpstreamConnection) -> None:
        """Relay bytes in both directions until either side closes or IDLE_SECONDS pass without any."""
        loop = asyncio.get_running_loop()
        last = loop.time()

        async def pump(source: HTTPStream, sink: HTTPStream) -> None:
            nonlocal last
            piece = source.connection.trailing_data[0]  # what came with the head
            while piece or (piece := await source.reader.read(BUFFER_BYTES)):
                last = loop.time()
                self._network.count_bytes(len(piece))
                sink.writer.write(piece)
                await sink.writer.drain()
                piece = b""

        pumps = {
            asyncio.ensure_future(pump(self._browser, upstream.http)),
            asyncio.ensure_future(pump(upstream.http, self._browser)),
        }
        try:
            while (left := last + IDLE_SECONDS - loop.time()) > 0:
                done, _ = await asyncio.wait(pumps, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if done:
                    done.pop().result()
                    return
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    # End of a connection

    async def _send_error_page(self, code: int, reason: str, sentence: str) -> None:
        """Send a short page as the response; abort the connection if a response has begun."""
        if not self._browser.can_respond:
            self._browser.writer.transport.abort()
            return
        headers, text = error_page(sentence)
        await self._browser.respond(code, reason, [*headers, (b"Connection", b"close")], text)
        try:
            self._browser.writer.write_eof()
        except OSError:
            return  # the browser has closed the connection
        try:  # closing with unread bytes resets the connection, and the browser would lose the page
            async with asyncio.timeout(LINGER_SECONDS):
                while await self._browser.reader.read(BUFFER_BYTES):
                    pass
        except TimeoutError:
            pass  # the browser still sends: it does not read the page

    def _close_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.http.writer.transport.abort()  # closing would wait for a server that no longer reads
            self._upstream = None


async def _relay_body(source: HTTPStream, sink: HTTPStream) -> None:
    async for piece in source.receive_body():
        await sink.send(h11.Data(data=piece))
    await sink.send(h11.EndOfMessage())


def _response(head: h11.Response | h11.InformationalResponse, headers: Headers) -> h11.Event:
    if head.status_code < 200 or head.status_code == 204:  # never with a body
        headers = [field for field in headers if field[0].lower().decode() not in FRAMING_HEADERS]
    return type(head)(status_code=head.status_code, reason=head.reason, headers=headers)


def _shown(error: h11.ProtocolError) -> str:
    return shorten(str(error), MAX_ERROR)
