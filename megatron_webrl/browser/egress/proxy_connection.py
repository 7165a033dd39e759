"""One connection from a browser to the egress proxy: forwarded requests, tunnels, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megatron_webrl.browser.egress.egress_policy import EgressDenied, Endpoint, parse_endpoint, split_url
from megatron_webrl.browser.egress.http1 import (
    BUFFER_BYTES,
    UNTIL_CLOSE,
    HTTPHead,
    MalformedHTTP,
    encode_error_page,
    encode_head,
    iter_body,
    read_head,
    request_body_length,
    response_body_length,
)
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.errors import HostUnreachable

REQUEST_SECONDS = 60.0  # for one plain HTTP request, from its head to the last byte of the response
IDLE_SECONDS = 120.0  # until an idle tunnel, or a connection without a request, is closed
THROTTLE_SECONDS = 0.3  # delay of a refusal beyond a quota: pages that retry in a loop must not busy the event loop
LINGER_SECONDS = 2.0  # to read on after an error page, before the connection closes


@dataclass(frozen=True)
class UpstreamConnection:
    """An open connection to a server."""

    endpoint: Endpoint
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


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
        self._reader, self._writer = reader, writer
        self._upstream: UpstreamConnection | None = None
        self._reused = False  # the upstream connection has served an earlier request
        self._host = ""  # of the current request
        self._responding = False  # part of the response has been sent

    async def run(self) -> None:
        """Serve requests until the connection closes."""
        task = asyncio.current_task()
        assert task is not None
        self._network.connections.add(task)
        try:
            await self._serve()
        except (ConnectionError, MalformedHTTP, asyncio.CancelledError):  # only cancelled to end this task
            self._writer.transport.abort()
        finally:
            self._network.connections.discard(task)
            self._writer.close()
            self._close_upstream()

    async def _serve(self) -> None:
        try:
            while await self._next():
                pass
        except EgressDenied as refused:
            self._network.record_refusal(self._host, refused)
            if refused.reason in ("requests", "bytes"):
                await asyncio.sleep(THROTTLE_SECONDS)
            await self._send_error_page(403, "Forbidden", str(refused))
        except HostUnreachable as error:
            self._network.record_error(self._host, str(error))
            self._writer.transport.abort()
        except TimeoutError:
            self._network.record_error(self._host, f"a request took more than {REQUEST_SECONDS} s")
            self._writer.transport.abort()

    async def _next(self) -> bool:
        """Serve the next request; returns whether another may follow."""
        self._responding, self._host = False, ""
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                head = await read_head(self._reader)
            if head is None:
                return False
            (method, target), length = head.parse_request_line(), request_body_length(head)
        except TimeoutError:
            return False
        except MalformedHTTP as error:
            await self._send_error_page(400, "Bad Request", f"the request is not understood: {error}")
            return False
        self._network.count_connection()
        self._network.count_request()
        self._network.count_bytes(head.size)
        if method == "CONNECT":
            await self._connect_through(target)
            return False
        async with asyncio.timeout(REQUEST_SECONDS):
            scheme, endpoint, path = split_url(target)
            self._host = endpoint.host
            if scheme not in ("http", "ws"):
                raise EgressDenied("scheme", f"{scheme}: needs a tunnel")
            code, keep_alive = await self._forward(method, endpoint, path, head, length)
        if code == 101 and self._upstream is not None:
            await self._tunnel(self._upstream)
            return False
        return keep_alive and "close" not in head.header_values("connection")

    async def _connect_through(self, target: str) -> None:
        endpoint = parse_endpoint(target)
        self._host = endpoint.host
        try:
            upstream = self._upstream = await self._connect(self._network, endpoint)
        except HostUnreachable as error:
            self._network.record_error(self._host, str(error))
            await self._send_error_page(502, "Bad Gateway", str(error))
            return
        self._writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await self._tunnel(upstream)

    # Plain requests

    async def _forward(
        self, method: str, endpoint: Endpoint, path: str, head: HTTPHead, length: int
    ) -> tuple[int, bool]:
        """Forward a request and its response; returns the status code and whether the connection stays open."""
        upgrade = "websocket" in head.header_values("upgrade")
        keep = frozenset({"connection", "upgrade"}) if upgrade else frozenset()
        host = str(endpoint).removesuffix(":80")
        fields = [(key, value) for key, value in head.end_to_end_headers(keep) if key.lower() not in ("host", "expect")]
        upstream = await self._upstream_for(endpoint)
        upstream.writer.write(encode_head(f"{method} {path} HTTP/1.1", [("Host", host), *fields]))
        if not length:
            return await self._relay_response(method, upstream, upgrade)
        sending = asyncio.ensure_future(self._relay(self._reader, upstream.writer, length))
        responding = asyncio.ensure_future(self._relay_response(method, upstream, upgrade))
        try:
            # A server may respond, and close the connection, before it has read the whole request.
            await asyncio.wait({sending, responding}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and isinstance(error := sending.exception(), EgressDenied | MalformedHTTP):
                raise error
            code, keep_alive = await responding
            return code, keep_alive and sending.done() and not sending.exception()
        finally:
            for task in (sending, responding):
                task.cancel()
            await asyncio.gather(sending, responding, return_exceptions=True)

    async def _relay_response(self, method: str, upstream: UpstreamConnection, upgrade: bool) -> tuple[int, bool]:
        code = 100
        while code < 200:
            head = await read_head(upstream.reader, strict=False)
            if head is None and self._reused:
                raise ConnectionError("the server has closed an idle connection")  # browsers retry on their own
            if head is None:
                raise HostUnreachable(f"{upstream.endpoint} ended the connection without an answer")
            self._network.count_bytes(head.size)
            code, reason, is_http11 = head.parse_status_line()
            if code == 101:
                if not upgrade:
                    raise MalformedHTTP("an upgrade that was not requested")
                headers = head.end_to_end_headers(frozenset({"connection", "upgrade"}))
                self._writer.write(encode_head(f"HTTP/1.1 101 {reason}", headers))
                return code, False
            length = response_body_length(head, method, code)
            keep_alive = is_http11 and length != UNTIL_CLOSE and "close" not in head.header_values("connection")
            headers = [*head.end_to_end_headers(), *([] if keep_alive or code < 200 else [("Connection", "close")])]
            self._writer.write(encode_head(f"HTTP/1.1 {code} {reason}", headers))
            self._responding = True
        await self._relay(upstream.reader, self._writer, length)
        if not keep_alive:
            self._close_upstream()
        return code, keep_alive

    async def _upstream_for(self, endpoint: Endpoint) -> UpstreamConnection:
        """The previous request's connection if it has the same endpoint and is open; else a new one."""
        upstream = self._upstream
        self._reused = upstream is not None and upstream.endpoint == endpoint and not upstream.reader.at_eof()
        if upstream is None or not self._reused:
            self._close_upstream()
            upstream = self._upstream = await self._connect(self._network, endpoint)
        return upstream

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int) -> None:
        async for piece in iter_body(reader, length):
            self._network.count_bytes(len(piece))
            writer.write(piece)
            await writer.drain()

    # Tunnels

    async def _tunnel(self, upstream: UpstreamConnection) -> None:
        """Relay bytes in both directions until either side closes or IDLE_SECONDS pass without any."""
        self._responding = True
        loop = asyncio.get_running_loop()
        last = loop.time()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal last
            while piece := await reader.read(BUFFER_BYTES):
                last = loop.time()
                self._network.count_bytes(len(piece))
                writer.write(piece)
                await writer.drain()

        pumps = {
            asyncio.ensure_future(pump(self._reader, upstream.writer)),
            asyncio.ensure_future(pump(upstream.reader, self._writer)),
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
        if self._responding:
            self._writer.transport.abort()
            return
        self._writer.write(encode_error_page(code, reason, sentence, [("Connection", "close")]))
        try:
            self._writer.write_eof()
        except OSError:
            return  # the browser has closed the connection
        try:  # closing with unread bytes resets the connection, and the browser would lose the page
            async with asyncio.timeout(LINGER_SECONDS):
                while await self._reader.read(BUFFER_BYTES):
                    pass
        except TimeoutError:
            pass  # the browser still sends: it does not read the page

    def _close_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.writer.transport.abort()  # closing would wait for a server that no longer reads
            self._upstream = None
