"""The proxy answers from recordings, over plain HTTP and TLS, and connects nowhere."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from megatron_webrl.browser.egress import connections
from megatron_webrl.browser.egress.egress_policy import NetworkAccess
from megatron_webrl.browser.egress.har import FORM_TYPE, HARReplayer
from tests.browser.egress.proxy_client import OK, Server, answering, ask, get, open_network, rest_of
from tests.browser.egress.recorded_visits import TASK, Recorded, write_visit

PAGE, SECURE = "http://a.test/page", "https://b.test/secure"


@asynccontextmanager
async def replaying(folder: Path, *exchanges: Recorded, **settings: object) -> AsyncIterator[NetworkAccess]:
    write_visit(folder, 0, *exchanges)
    async with open_network(replay=str(folder), **settings) as network:
        network.replayer = await HARReplayer.open(folder, TASK)
        yield network


async def ask_over_tls(network: NetworkAccess, host: str, *requests: str) -> bytes:
    """Send requests through one tunnel, the last with Connection: close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
    writer.write(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n".encode())
    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    await writer.start_tls(context, server_hostname=host)
    for request in requests:
        writer.write(request.encode())
    try:
        return await rest_of(reader)
    finally:
        writer.close()


async def test_recorded_requests_are_answered_and_the_server_is_not_asked(tmp_path: Path) -> None:
    async with Server(answering(OK)) as server:
        url = "http://a.test/page"
        origins = {"http://a.test": f"127.0.0.1:{server.port}"}
        async with replaying(tmp_path, Recorded(url, b"recorded"), origins=origins) as network:
            assert (await ask(network, get(url))).endswith(b"recorded")
            assert b"was not recorded" in await ask(network, get(f"{url}/other"))
            assert (network.totals.replayed, network.refused) == (1, {"not_recorded": 1})
        assert server.connections == 0


async def test_a_connection_serves_on_after_a_request_that_was_not_recorded(tmp_path: Path) -> None:
    async with replaying(tmp_path, Recorded(PAGE, b"text", headers=(("Content-Type", "text/plain"),))) as network:
        first = "GET http://a.test/x HTTP/1.1\r\nHost: a.test\r\n\r\n"
        text = (await ask(network, first + get(PAGE))).decode()
        assert text.startswith("HTTP/1.1 403 Forbidden")
        assert "GET http://a.test/x was not recorded (browser.replay)" in text
        assert text.endswith(
            "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\nContent-Length: 4\r\nConnection: close\r\n\r\ntext"
        )
        assert network.take_errors(PAGE) == ["GET http://a.test/x was not recorded (browser.replay)"]


async def test_requests_over_tls_are_answered_without_their_host(tmp_path: Path) -> None:
    asked = Recorded(SECURE, b"found", method="POST", posted=b"q=1", posted_type=FORM_TYPE)
    async with replaying(tmp_path, Recorded(SECURE, b"secret"), asked) as network:
        post = f"POST /secure HTTP/1.1\r\nHost: b.test\r\nContent-Type: {FORM_TYPE}\r\nContent-Length: 3\r\n\r\nq=1"
        text = await ask_over_tls(network, "b.test", post, get("/secure"), get("/never"))
        assert text.index(b"found") < text.index(b"secret")
        text = await ask_over_tls(network, "c.test", get("/secure"))
        assert b"GET https://c.test/secure was not recorded" in text
        assert network.refused == {"not_recorded": 1}


async def test_a_request_that_failed_in_the_recording_fails_again(tmp_path: Path) -> None:
    broken = Recorded(PAGE, None, status=-1, failure="net::ERR_NAME_NOT_RESOLVED")
    async with replaying(tmp_path, broken) as network:
        assert await ask(network, get(PAGE)) == b""
        assert not network.refused


async def test_a_request_that_the_page_gave_up_waits_until_the_browser_gives_it_up(tmp_path: Path) -> None:
    begun = Recorded("http://a.test/half", None, failure="net::ERR_ABORTED", headers=(("X-Own", "kept"),))
    async with replaying(tmp_path, Recorded(PAGE, None, status=-1, failure="net::ERR_ABORTED"), begun) as network:
        for url, head in (
            (PAGE, b""),
            (begun.url, b"x-own: kept\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
            writer.write(get(url).encode())
            while not network.connections:
                await asyncio.sleep(0)
            (connection,) = network.connections
            if head:
                assert (await reader.readuntil(b"\r\n\r\n")).endswith(head)
            assert not connection.done()
            writer.close()
            await connection
        assert (network.totals.replayed, network.refused) == (2, {})


async def test_a_request_that_is_not_given_up_again_fails_at_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
    async with replaying(tmp_path, Recorded(PAGE, None, status=-1, failure="net::ERR_ABORTED")) as network:
        assert await ask(network, get(PAGE)) == b""


async def test_pages_of_other_origins_get_the_permission_they_ask_for(tmp_path: Path) -> None:
    async with replaying(tmp_path, Recorded(PAGE)) as network:
        wanted = "Origin: https://b.test", "Access-Control-Request-Method: PUT", "Access-Control-Request-Headers: x-own"
        text = (await ask(network, get(PAGE, *wanted).replace("GET", "OPTIONS"))).decode()
        assert text.startswith("HTTP/1.1 204 ")
        for header in ("origin: https://b.test", "methods: PUT", "headers: x-own"):
            assert f"access-control-allow-{header}\r\n" in text
        assert " 403 " in (await ask(network, get(PAGE).replace("GET", "OPTIONS"))).decode()


async def test_headers_have_the_bytes_that_the_server_sent(tmp_path: Path) -> None:
    sent = bytes(byte for byte in range(256) if byte >= 0x80)
    shown = "".join(bytes([byte]).decode("windows-1252", "replace") for byte in sent)
    shown = "".join(chr(byte) if text == "\ufffd" else text for byte, text in zip(sent, shown, strict=True))
    headers = (("X-Name", shown), ("X-Other", "\u65e5\ud800"))
    async with replaying(tmp_path, Recorded(PAGE, b"text", headers=headers)) as network:
        response = await ask(network, get(PAGE))
        assert b"x-name: " + sent + b"\r\n" in response
        assert "x-other: \u65e5?\r\n".encode() in response
        assert response.endswith(b"text")


async def test_sockets_are_named_and_counted(tmp_path: Path) -> None:
    async with replaying(tmp_path, Recorded(PAGE)) as network:
        upgrade = "Upgrade: websocket", "Sec-WebSocket-Key: x"
        assert b"WebSocket https://b.test/chat was not recorded" in await ask_over_tls(
            network, "b.test", get("/chat", *upgrade)
        )
        plain = b"CONNECT b.test:80 HTTP/1.1\r\nHost: b.test:80\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
        writer.write(plain)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(get("/chat", *upgrade).encode())
        await rest_of(reader)
        writer.close()
        assert network.refused == {"not_recorded": 2}
        assert "WebSocket ws://b.test:80 was not recorded (browser.replay)" in network.take_errors("http://b.test")


async def test_an_episode_has_its_quotas_in_a_replay_too(tmp_path: Path) -> None:
    async with replaying(tmp_path, Recorded(PAGE, b"x" * (1 << 19)), max_network_mib=1) as network:
        assert (await ask(network, get(PAGE))).endswith(b"xxx")
        assert b"1 MiB" in await ask(network, get(PAGE))
        assert network.refused == {"bytes": 1}
    async with replaying(tmp_path, Recorded(PAGE), max_requests=1) as network:
        await ask(network, get(PAGE))
        assert b"1 requests" in await ask(network, get(PAGE))
        assert network.refused == {"requests": 1}


async def test_nothing_is_answered_before_an_episode_begins(tmp_path: Path) -> None:
    async with open_network(replay=str(tmp_path)) as network:
        assert b"was not recorded" in await ask(network, get(PAGE))
