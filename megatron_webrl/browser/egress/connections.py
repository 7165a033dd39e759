"""One connection from a browser to the egress proxy: requests are forwarded, or answered by recordings.

h11 parses every message and writes another one, so that no two parsers can differ.
"""

from __future__ import annotations

import asyncio
import codecs
import html
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress

import h11

from megatron_webrl.browser.egress.egress_policy import (
    NOT_RECORDED,
    EgressDenied,
    Endpoint,
    NetworkAccess,
    parse_endpoint,
    split_url,
)
from megatron_webrl.browser.egress.har import (
    FAILED_STATUS,
    FRAMING_HEADERS,
    HOP_BY_HOP_HEADERS,
    RecordedResponse,
    ReplayRequest,
)
from megatron_webrl.browser.errors import HostUnreachable, NotRecorded
from megatron_webrl.util.text import shorten

MAX_HEAD_BYTES = 65536  # for a head or the line of a chunk
BUFFER_BYTES = 65536
UPGRADE = [(b"Connection", b"Upgrade"), (b"Upgrade", b"websocket")]
Headers = list[tuple[bytes, bytes]]
REQUEST_SECONDS = 60.0  # for one plain HTTP request, from its head to the last byte of the response
IDLE_SECONDS = 120.0  # until an idle tunnel, or a connection without a request, is closed
THROTTLE_SECONDS = 0.3  # delay of a refusal beyond a quota: pages that retry in a loop must not busy the event loop
LINGER_SECONDS = 2.0  # to read on after an error page, before the connection closes
PREFLIGHT_SECONDS = 600  # for which the browser need not ask again
MAX_ERROR = 200  # characters of a message about malformed HTTP
MAX_URL = 120  # characters of a URL in a message


class HTTPStream:
    """One side's messages on a connection: h11's events, read from and written to asyncio streams."""

    def __init__(
        self, role: type[h11.CLIENT] | type[h11.SERVER], reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        count_bytes: Callable[[int], None], endpoint: Endpoint | None = None,
    ) -> None:  # fmt: skip
        """`role`: this process's. `count_bytes` is called with the number of bytes of each read. `endpoint`: the peer
        of a client.
        """
        self.endpoint = endpoint
        self.connection = h11.Connection(role, MAX_HEAD_BYTES)
        self.reader, self.writer = reader, writer
        self._count_bytes = count_bytes
        self._method = b""  # of the current request

    async def receive(self) -> h11.Event:
        """The next event; ConnectionClosed if the peer closes before a message. Raises h11.RemoteProtocolError."""
        while (event := self.connection.next_event()) is h11.NEED_DATA:
            data = await self.reader.read(BUFFER_BYTES)
            self._count_bytes(len(data))
            if not data and not self.connection.trailing_data[0] and self.connection.their_state is h11.SEND_RESPONSE:
                return h11.ConnectionClosed()
            self.connection.receive_data(data)
        if isinstance(event, h11.Request):
            self._method = event.method
            if {name.decode() for name, _ in event.headers} >= FRAMING_HEADERS:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding")
        assert not isinstance(event, type)
        return event

    async def receive_body(self) -> AsyncIterator[bytes]:
        """Yield the body of the message in pieces; trailers are dropped. Raises h11.RemoteProtocolError."""
        while isinstance(event := await self.receive(), h11.Data):
            yield bytes(event.data)

    async def send(self, event: h11.Event) -> None:
        """Send an event. Raises h11.LocalProtocolError."""
        self.writer.write(self.connection.send(event) or b"")
        await self.writer.drain()

    async def respond(self, status: int, reason: str, headers: Headers, body: bytes) -> None:
        """Send a whole response; its body is left out where a response has none."""
        self.writer.write(self.connection.send(h11.Response(status_code=status, reason=reason, headers=headers)) or b"")
        bodiless = status in (204, 304) or self._method == b"HEAD"
        await self.send(h11.Data(data=b"" if bodiless else body))
        await self.send(h11.EndOfMessage())

    def next_message(self) -> bool:
        """Prepare for another message on the connection; returns whether one is possible."""
        if (self.connection.our_state, self.connection.their_state) != (h11.DONE, h11.DONE):
            return False
        self.connection.start_next_cycle()
        return True


def header_values(headers: Iterable[tuple[bytes, bytes]], name: str) -> list[str]:
    """The comma-separated values of all headers with that name, in lower case."""
    values = [value.decode("latin-1").lower() for key, value in headers if key.lower() == name.encode()]
    return [item.strip(" \t") for value in values for item in value.split(",")]


def end_to_end_headers(head: h11.Request | h11.InformationalResponse | h11.Response) -> Headers:
    """The headers without hop-by-hop ones, those that Connection names among them."""
    dropped = (HOP_BY_HOP_HEADERS | set(header_values(head.headers, "connection"))) - FRAMING_HEADERS
    return [(name, value) for name, value in head.headers.raw_items() if name.lower().decode() not in dropped]


def encode_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1", "windows-1252-or-utf-8")) for name, value in headers]


def _encode_beyond_latin1(error: UnicodeError) -> tuple[bytes, int]:
    """DevTools decode the bytes of a header as Windows-1252; text beyond it is sent as UTF-8."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    try:
        return text.encode("windows-1252"), error.end
    except UnicodeEncodeError:
        return text.encode(errors="replace"), error.end


codecs.register_error("windows-1252-or-utf-8", _encode_beyond_latin1)


def error_page(sentence: str) -> tuple[Headers, bytes]:
    """Headers and body of a short page that says why there is no other."""
    text = f"<!DOCTYPE html><title>Not reachable</title><p>Not reachable: {html.escape(sentence)}.</p>".encode()
    fields = {
        "Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(text)), "Cache-Control": "no-store",
        "Content-Security-Policy": "default-src 'none'",
    }  # fmt: skip
    return encode_headers(fields.items()), text


class BrowserConnection:
    """Serves requests until either side closes the connection."""

    def __init__(self, network: NetworkAccess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._network = network
        self._browser = HTTPStream(h11.SERVER, reader, writer, network.count_bytes)

    async def run(self) -> None:
        """Serve requests until the connection closes."""
        task = asyncio.current_task()
        assert task is not None
        self._network.connections.add(task)
        try:
            await self._serve()
        except (ConnectionError, h11.ProtocolError, TimeoutError, asyncio.CancelledError):
            self._browser.writer.transport.abort()  # only cancelled to end this task
        finally:
            self._network.connections.discard(task)
            self._browser.writer.close()
            self._end()

    async def _serve(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Close what the connection has opened."""

    async def _accept_tunnel(self) -> None:
        if not isinstance(await self._browser.receive(), h11.EndOfMessage):
            raise ConnectionError("a request for a tunnel with a body")
        await self._browser.send(h11.Response(status_code=200, reason="Connection established", headers=[]))

    async def _record_refusal(self, host: str, refused: EgressDenied) -> None:
        self._network.record_refusal(host, refused)
        if refused.reason in ("requests", "bytes"):
            await asyncio.sleep(THROTTLE_SECONDS)


class ProxyConnection(BrowserConnection):
    """Forwards requests and tunnels.

    A refused request gets a page with one sentence. A request to an unreachable server gets no response, so that the
    browser reports it as it would without a proxy; a tunnel to one gets status 502.
    """

    def __init__(
        self, network: NetworkAccess, connect: Callable[[NetworkAccess, Endpoint], Awaitable[HTTPStream]],
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
    ) -> None:  # fmt: skip
        super().__init__(network, reader, writer)
        self._connect = connect
        self._upstream: HTTPStream | None = None
        self._host = self._url = ""  # of the current request; no URL: a tunnel

    async def _serve(self) -> None:
        try:
            while await self._next():
                pass
        except EgressDenied as refused:
            self._network.refused_urls.add(self._url)
            await self._record_refusal(self._host, refused)
            await self._send_error_page(403, "Forbidden", str(refused))
        except HostUnreachable as error:
            self._network.record_error(self._host, str(error))
            self._browser.writer.transport.abort()
        except TimeoutError:
            self._network.record_error(self._host, f"a request took more than {REQUEST_SECONDS} s")
            self._browser.writer.transport.abort()

    def _end(self) -> None:
        if self._upstream is not None:
            self._upstream.writer.transport.abort()  # closing would wait for a server that no longer reads
            self._upstream = None

    async def _next(self) -> bool:
        """Serve the next request; returns whether another may follow."""
        self._host = self._url = ""
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                request = await self._browser.receive()
        except TimeoutError:
            return False
        except h11.RemoteProtocolError as error:
            await self._send_error_page(
                400, "Bad Request", f"the request is not understood: {shorten(str(error), MAX_ERROR)}"
            )
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
        self._end()
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
        await self._accept_tunnel()
        await self._tunnel(upstream)

    async def _forward(self, request: h11.Request, endpoint: Endpoint, path: str) -> HTTPStream:
        """Forward a request and its response on a connection of its own, which this returns."""
        is_socket = "websocket" in header_values(request.headers, "upgrade")
        connection = UPGRADE if is_socket else [(b"Connection", b"close")]
        fields = [field for field in end_to_end_headers(request) if field[0].lower() not in (b"host", b"expect")]
        host = str(endpoint).removesuffix(":80").encode()
        upstream = self._upstream = await self._connect(self._network, endpoint)
        await upstream.send(
            h11.Request(method=request.method, target=path, headers=[(b"Host", host), *fields, *connection])
        )
        sending = asyncio.ensure_future(_relay_body(self._browser, upstream))
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

    async def _relay_response(self, upstream: HTTPStream) -> None:
        try:
            while isinstance(head := await upstream.receive(), h11.InformationalResponse):
                upgrade = UPGRADE if head.status_code == 101 else []
                await self._browser.send(_response(head, [*end_to_end_headers(head), *upgrade]))
                if upgrade:
                    return
        except h11.RemoteProtocolError as error:
            raise HostUnreachable(f"{upstream.endpoint} sent no valid HTTP: {shorten(str(error), MAX_ERROR)}") from None
        if not isinstance(head, h11.Response):
            raise HostUnreachable(f"{upstream.endpoint} ended the connection without an answer")
        await self._browser.send(_response(head, end_to_end_headers(head)))
        await _relay_body(upstream, self._browser)

    async def _tunnel(self, upstream: HTTPStream) -> None:
        """Relay bytes in both directions until either side closes or IDLE_SECONDS pass without any."""
        loop = asyncio.get_running_loop()

        async def pump(source: HTTPStream, sink: HTTPStream) -> None:
            piece = source.connection.trailing_data[0]  # what came with the head
            while piece or (piece := await source.reader.read(BUFFER_BYTES)):
                idle.reschedule(loop.time() + IDLE_SECONDS)
                self._network.count_bytes(len(piece))
                sink.writer.write(piece)
                await sink.writer.drain()
                piece = b""

        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_SECONDS) as idle:
                pumps = [
                    asyncio.ensure_future(pump(*ends))
                    for ends in ((self._browser, upstream), (upstream, self._browser))
                ]
                try:
                    done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                    done.pop().result()
                finally:
                    for task in pumps:
                        task.cancel()
                    await asyncio.gather(*pumps, return_exceptions=True)

    async def _send_error_page(self, code: int, reason: str, sentence: str) -> None:
        """Send a short page as the response; abort the connection if a response has begun."""
        if self._browser.connection.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self._browser.writer.transport.abort()
            return
        headers, text = error_page(sentence)
        await self._browser.respond(code, reason, [*headers, (b"Connection", b"close")], text)
        try:
            self._browser.writer.write_eof()
        except OSError:
            return  # the browser has closed the connection
        with suppress(TimeoutError):  # closing with unread bytes resets the connection: the browser would lose the page
            async with asyncio.timeout(LINGER_SECONDS):
                while await self._browser.reader.read(BUFFER_BYTES):
                    pass


async def _relay_body(source: HTTPStream, sink: HTTPStream) -> None:
    async for piece in source.receive_body():
        await sink.send(h11.Data(data=piece))
    await sink.send(h11.EndOfMessage())


def _response(head: h11.Response | h11.InformationalResponse, headers: Headers) -> h11.Event:
    if head.status_code < 200 or head.status_code == 204:  # never with a body
        headers = [field for field in headers if field[0].lower().decode() not in FRAMING_HEADERS]
    return type(head)(status_code=head.status_code, reason=head.reason, headers=headers)


class ReplayConnection(BrowserConnection):
    """Answers requests from recordings; never connects anywhere.

    Tunnels end here: the browser accepts the proxy's certificate, so that requests over TLS are answered too. A request
    that was not recorded gets a page with one sentence, status 403; one that failed in the recording fails, and one
    that its page gave up there waits for the browser to give it up.
    """

    def __init__(
        self, network: NetworkAccess, tls: ssl.SSLContext, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """`tls`: the server's side, towards the browser."""
        super().__init__(network, reader, writer)
        self._tls = tls

    async def _serve(self, origin: str = "") -> None:
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
        await self._accept_tunnel()
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

    async def _response(self, request: h11.Request, url: str) -> RecordedResponse:
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
            network.totals.replayed += 1
        elif (response := _preflight_response(method, fields)) is None:
            network.unrecorded_urls.add(url)
            is_socket = "websocket" in header_values(request.headers, "upgrade")
            raise _not_recorded("WebSocket" if is_socket else method, url)
        return response

    async def _hold(self, response: RecordedResponse) -> None:
        """Send what came before the page gave up, and wait until it gives up again, REQUEST_SECONDS at most."""
        if response.status != FAILED_STATUS:
            headers = encode_headers(response.headers)
            await self._browser.send(h11.Response(status_code=response.status, reason=response.reason, headers=headers))
        while await self._browser.reader.read(BUFFER_BYTES):
            pass

    async def _refuse(self, host: str, refused: EgressDenied) -> None:
        await self._record_refusal(host, refused)
        headers, text = error_page(str(refused))
        await self._browser.respond(403, "Forbidden", headers, text)


def _not_recorded(kind: str, url: str) -> EgressDenied:
    return EgressDenied(NOT_RECORDED, f"{kind} {shorten(url, MAX_URL)} was not recorded (browser.replay)")


def _preflight_response(method: str, fields: dict[str, str]) -> RecordedResponse | None:
    """The permission that a page of another origin asks for; browsers ask on their own, and HAR omits it."""
    if method != "OPTIONS" or "access-control-request-method" not in fields:
        return None
    headers = {
        "origin": fields.get("origin", "*"),
        "credentials": "true",
        "methods": fields["access-control-request-method"],
        "headers": fields.get("access-control-request-headers", "*"),
    }
    allowed = [(f"access-control-allow-{name}", value) for name, value in headers.items()]
    return RecordedResponse(204, "No Content", (*allowed, ("access-control-max-age", str(PREFLIGHT_SECONDS))))
