"""One connection from a browser to the gateway: requests that are passed on, tunnels, and refusals."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from megatron_webrl.browser.egress.egress_policy import EgressDenied, Endpoint, parse_endpoint, split_url
from megatron_webrl.browser.egress.http1 import (
    BUFFER_BYTES,
    UNTIL_CLOSE,
    HTTPHead,
    MalformedHTTP,
    encode_head,
    iter_body,
    read_head,
    request_body_length,
    response_body_length,
)
from megatron_webrl.browser.egress.network_access import NetworkAccess
from megatron_webrl.browser.errors import HostUnreachable

IDLE_SECONDS = 120.0
"""A tunnel through which nothing goes, or a connection without a request, is closed after so long."""

THROTTLE_SECONDS = 0.3
"""A page that has used up what it may is answered no sooner: refusals in a row would keep the whole fleet busy."""

LINGER_SECONDS = 2.0


@dataclass(frozen=True)
class UpstreamConnection:
    """A connection to a server."""

    endpoint: Endpoint
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class ProxyConnection:
    """Serves one connection until either side ends it.

    What is refused is answered by a page with one sentence. What cannot be reached is not answered at all, so that the
    browser reports it as it would without a gateway; for a tunnel it is a status of 502.
    """

    def __init__(
        self, access: NetworkAccess, connect: Callable[[NetworkAccess, Endpoint], Awaitable[UpstreamConnection]], request_seconds: float,
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        self._access, self._connect, self._request_seconds = access, connect, request_seconds
        self._reader, self._writer = reader, writer
        self._upstream: UpstreamConnection | None = None
        self._reused = False  # the upstream has answered a request before
        self._host = ""  # that the request is for
        self._answering = False  # bytes of an answer have gone out

    async def run(self) -> None:
        """Answer requests; returns when the connection is closed."""
        task = asyncio.current_task()
        assert task is not None
        self._access.connections.add(task)
        try:
            await self._serve()
        except (ConnectionError, MalformedHTTP, asyncio.CancelledError):  # nothing waits for this task but its end
            self._writer.transport.abort()
        finally:
            self._access.connections.discard(task)
            self._writer.close()
            self._hang_up()

    async def _serve(self) -> None:
        try:
            while await self._next():
                pass
        except EgressDenied as refused:
            self._access.record_refusal(self._host, refused)
            if refused.reason in ("requests", "bytes"):
                await asyncio.sleep(THROTTLE_SECONDS)
            await self._page(403, "Forbidden", str(refused))
        except HostUnreachable as error:
            self._access.record_error(self._host, str(error))
            self._writer.transport.abort()
        except TimeoutError:
            self._access.record_error(
                self._host, f"a request took more than {self._request_seconds} s (browser.request_timeout_seconds)"
            )
            self._writer.transport.abort()

    async def _next(self) -> bool:
        """Serve the next request; whether there may be another."""
        self._answering, self._host = False, ""
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                head = await read_head(self._reader)
            if head is None:
                return False
            (method, target), length = head.parse_request_line(), request_body_length(head)
        except TimeoutError:
            return False
        except MalformedHTTP as error:
            await self._page(400, "Bad Request", f"the request is not understood: {error}")
            return False
        self._access.count_connection()
        self._access.count_request()
        self._access.count_bytes(head.size)
        if method == "CONNECT":
            await self._connect_through(target)
            return False
        async with asyncio.timeout(self._request_seconds):
            scheme, endpoint, path = split_url(target)
            self._host = endpoint.host
            if scheme not in ("http", "ws"):
                raise EgressDenied("scheme", f"{scheme}: needs a tunnel")
            code, more = await self._forward(method, endpoint, path, head, length)
        if code == 101 and self._upstream is not None:
            await self._tunnel(self._upstream)
            return False
        return more and "close" not in head.header_values("connection")

    async def _connect_through(self, target: str) -> None:
        endpoint = parse_endpoint(target)
        self._host = endpoint.host
        try:
            upstream = self._upstream = await self._connect(self._access, endpoint)
        except HostUnreachable as error:
            self._access.record_error(self._host, str(error))
            await self._page(502, "Bad Gateway", str(error))
            return
        self._writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await self._tunnel(upstream)

    # Plain requests

    async def _forward(
        self, method: str, endpoint: Endpoint, path: str, head: HTTPHead, length: int
    ) -> tuple[int, bool]:
        """Pass a request on and its answer back; the answer's code, and whether the connection goes on."""
        upgrade = "websocket" in head.header_values("upgrade")
        keep = frozenset({"connection", "upgrade"}) if upgrade else frozenset()
        shown = str(endpoint).removesuffix(":80")
        kept = [
            (name, value) for name, value in head.end_to_end_headers(keep) if name.lower() not in ("host", "expect")
        ]
        upstream = await self._upstream_for(endpoint)
        upstream.writer.write(encode_head(f"{method} {path} HTTP/1.1", [("Host", shown), *kept]))
        if not length:
            return await self._answer(method, upstream, upgrade)
        sending = asyncio.ensure_future(self._pass_on(self._reader, upstream.writer, length))
        answering = asyncio.ensure_future(self._answer(method, upstream, upgrade))
        try:
            # A server may answer, and hang up, before it has read everything.
            await asyncio.wait({sending, answering}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and isinstance(error := sending.exception(), EgressDenied | MalformedHTTP):
                raise error
            code, more = await answering
            return code, more and sending.done() and not sending.exception()
        finally:
            for task in (sending, answering):
                task.cancel()
            await asyncio.gather(sending, answering, return_exceptions=True)

    async def _answer(self, method: str, upstream: UpstreamConnection, upgrade: bool) -> tuple[int, bool]:
        code = 100
        while code < 200:
            head = await read_head(upstream.reader, strict=False)
            if head is None and self._reused:
                raise ConnectionError("the server has closed an idle connection")  # browsers ask again by themselves
            if head is None:
                raise HostUnreachable(f"{upstream.endpoint} ended the connection without an answer")
            self._access.count_bytes(head.size)
            code, reason, modern = head.parse_status_line()
            if code == 101:
                if not upgrade:
                    raise MalformedHTTP("an answer that nobody asked for")
                headers = head.end_to_end_headers(frozenset({"connection", "upgrade"}))
                self._writer.write(encode_head(f"HTTP/1.1 101 {reason}", headers))
                return code, False
            length = response_body_length(head, method, code)
            more = modern and length != UNTIL_CLOSE and "close" not in head.header_values("connection")
            headers = [*head.end_to_end_headers(), *([] if more or code < 200 else [("Connection", "close")])]
            self._writer.write(encode_head(f"HTTP/1.1 {code} {reason}", headers))
            self._answering = True
        await self._pass_on(upstream.reader, self._writer, length)
        if not more:
            self._hang_up()
        return code, more

    async def _upstream_for(self, endpoint: Endpoint) -> UpstreamConnection:
        """The connection of the request before, if it leads there and still stands; else another."""
        upstream = self._upstream
        self._reused = upstream is not None and upstream.endpoint == endpoint and not upstream.reader.at_eof()
        if upstream is None or not self._reused:
            self._hang_up()
            upstream = self._upstream = await self._connect(self._access, endpoint)
        return upstream

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int) -> None:
        async for piece in iter_body(reader, length):
            self._access.count_bytes(len(piece))
            writer.write(piece)
            await writer.drain()

    # Tunnels

    async def _tunnel(self, upstream: UpstreamConnection) -> None:
        """Pass bytes in both directions until either side ends or nothing has gone through for IDLE_SECONDS."""
        self._answering = True
        loop = asyncio.get_running_loop()
        last = loop.time()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal last
            while piece := await reader.read(BUFFER_BYTES):
                last = loop.time()
                self._access.count_bytes(len(piece))
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

    # Ends

    async def _page(self, code: int, reason: str, sentence: str) -> None:
        """A short page instead of an answer; an answer that has begun is cut off."""
        if self._answering:
            self._writer.transport.abort()
            return
        text = f"<!DOCTYPE html><title>Not reachable</title><p>Not reachable: {html.escape(sentence)}.</p>".encode()
        headers = [
            ("Content-Type", "text/html; charset=utf-8"), ("Content-Length", str(len(text))),
            ("Cache-Control", "no-store"), ("Connection", "close"),
        ]  # fmt: skip
        self._writer.write(encode_head(f"HTTP/1.1 {code} {reason}", headers) + text)
        try:
            self._writer.write_eof()
        except OSError:
            return  # the browser has hung up already
        # To close before everything is read would reset the connection, and the page would be lost.
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while await self._reader.read(BUFFER_BYTES):
                    pass
        except TimeoutError:
            pass  # whoever sends so much does not want the page

    def _hang_up(self) -> None:
        if self._upstream is not None:
            self._upstream.writer.transport.abort()  # to close would wait for a server that no longer reads
            self._upstream = None
