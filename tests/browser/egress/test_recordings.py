"""Recordings that a test writes itself: which response answers a request, and what the proxy sends to the browser."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
import time
import zipfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

import pytest

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.egress import connections
from megatron_webrl.browser.egress.egress_policy import NetworkAccess
from megatron_webrl.browser.egress.har import (
    FAILED_STATUS,
    FORM_TYPE,
    FORMAT,
    HAR_MEMBER,
    VISIT_MEMBER,
    HARReplayer,
    RecordedResponse,
    ReplayRequest,
    RequestKey,
    har_name,
    visit_path,
)
from megatron_webrl.browser.errors import NotRecorded
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.types import Task
from tests.browser.egress.proxy_client import ask, get, head_of, open_network, rest_of

TASK = Task(id="web/test", source="web", environment="page", seed=0, max_steps=5, url="http://a.test/")
CLOCK_MS = 1_600_000_000_000
A, B = "http://a.test/a", "http://a.test/b"
PAGE = "http://a.test/page"
GIVEN_UP = "net::ERR_ABORTED"


@dataclass(frozen=True)
class Recorded:
    """A request of a visit and its response; `content` None: the body was lost."""

    url: str
    content: bytes | None = b""
    status: int = 200
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    posted: bytes | None = None
    posted_type: str = "application/octet-stream"
    request_headers: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    from_cache: bool = False  # of the browser


def write_visit(folder: Path, *exchanges: Recorded, visit: int = 0, clock_ms: int = CLOCK_MS) -> Path:
    path = visit_path(folder, TASK, visit)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(VISIT_MEMBER, json.dumps({"format": FORMAT, "task": TASK.id, "clock_ms": clock_ms}))
        entries = [_entry(file, exchange) for exchange in exchanges]
        file.writestr(HAR_MEMBER, json.dumps({"log": {"entries": entries}}))
    return path


def _entry(file: zipfile.ZipFile, exchange: Recorded) -> dict[str, object]:
    sent = {} if exchange.from_cache or exchange.status <= 0 else {"Host": "a.test"}
    request: dict[str, object] = {
        "method": exchange.method, "url": exchange.url,
        "headers": [{"name": name, "value": value} for name, value in {**sent, **exchange.request_headers}.items()],
    }  # fmt: skip
    if exchange.posted is not None:
        request["postData"] = {"mimeType": exchange.posted_type, "_file": _store(file, exchange.posted)}
    content = {} if exchange.content is None else {"_file": _store(file, exchange.content)}
    response: dict[str, object] = {
        "status": exchange.status, "statusText": "OK", "content": content,
        "headers": [{"name": name, "value": value} for name, value in exchange.headers],
    }  # fmt: skip
    if exchange.failure is not None:
        response["_failureText"] = exchange.failure
    return {"request": request, "response": response}


def _store(file: zipfile.ZipFile, content: bytes) -> str:
    name = f"{hashlib.sha1(content).hexdigest()}.dat"
    if name not in file.namelist():
        file.writestr(name, content)
    return name


async def replayer_of(folder: Path, *exchanges: Recorded, ignored: Sequence[str] = ()) -> HARReplayer:
    write_visit(folder, *exchanges)
    return await HARReplayer.open(folder, TASK, ignored)


async def responses(replayer: HARReplayer, *requests: str | ReplayRequest) -> list[RecordedResponse | None]:
    """The response to each request, a URL being a GET; None: not recorded."""
    asked = [ReplayRequest("GET", request) if isinstance(request, str) else request for request in requests]
    return [await replayer.find(request) for request in asked]


async def bodies(replayer: HARReplayer, *requests: str | ReplayRequest) -> list[bytes | None]:
    return [response and response.body for response in await responses(replayer, *requests)]


# Which response answers a request

HTTP2, BLOB, HALF = {":authority": "a.test"}, {"Content-Length": "9"}, {"content": None, "failure": GIVEN_UP}
CASES: dict[str, tuple[list[Recorded], list[str | ReplayRequest], list[bytes | None]]] = {
    "the recorded order, the last one repeats": (
        [Recorded(A, b"1"), Recorded(B, b"b"), Recorded(A, b"2")],
        [A, A, f"{A}#part", B, B, "http://a.test/c", f"{A}?x=1"], [b"1", b"2", b"2", b"b", b"b", None, None],
    ),
    "methods, bodies and ranges tell requests apart": (
        [Recorded(A, b"one", method="POST", posted=b"\xff\x00"), Recorded(A, b"two", method="POST", posted=b"\xfe\x00"),
         Recorded(A, b"ab", status=206, request_headers={"Range": "bytes=0-1"})],
        [ReplayRequest("POST", A, "application/octet-stream", b"\xfe\x00"), ReplayRequest("POST", A, body=b"\xff\x00"),
         ReplayRequest("POST", A), ReplayRequest("PUT", A, body=b"\xff\x00"), A,
         ReplayRequest("GET", A, byte_range="bytes=0-1")],
        [b"two", b"one", None, None, None, b"ab"],
    ),
    "a copy that was still right; lost bodies and sockets": (
        [Recorded(A, b"copy"), Recorded(A, None, status=304), Recorded(A, b"changed"), Recorded(B, None),
         Recorded("ws://a.test/", None, status=101)],
        [A, A, A, B, "ws://a.test/"], [b"copy", b"copy", b"changed", None, None],
    ),
    "responses of the browser's cache count where nothing else was recorded": (
        [Recorded(A, b"1"), Recorded(A, b"1", from_cache=True), Recorded(A, b"2"),
         Recorded(B, None), Recorded(B, b"copy", from_cache=True)],
        [A, A, A, B], [b"1", b"2", b"2", b"copy"],
    ),
    "headers of HTTP/2 tell what came from a server": (
        [Recorded(A, b"1", from_cache=True, request_headers=HTTP2), Recorded(A, b"1", from_cache=True),
         Recorded(A, b"2", from_cache=True, request_headers=HTTP2)],
        [A, A], [b"1", b"2"],
    ),
    "a copy is of a response that was not given up": (
        [Recorded(A, b"1"), Recorded(A, **HALF), Recorded(A, None, status=304),
         Recorded(B, **HALF), Recorded(B, b"whole", from_cache=True)],
        [A, A, A, B, B], [b"1", b"", b"1", b"", b"whole"],
    ),
    "a body that was not recorded equals any that no other request has": (
        [Recorded(A, b"blob", method="POST", request_headers=BLOB),
         Recorded(A, b"text", method="POST", posted=b"words"), Recorded(A, b"none", method="POST"),
         Recorded(f"{B}?n=1", b"upload", method="POST", request_headers=BLOB)],
        [*(ReplayRequest("POST", A, body=body) for body in (b"words", b"a picture", b"")),
         *(ReplayRequest("POST", f"{B}?n=2", body=body) for body in (b"a picture", b"")),
         ReplayRequest("PUT", A, body=b"1")],
        [b"text", b"blob", b"none", b"upload", None, None],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_the_responses_to_requests_are_those_of_the_visit(tmp_path: Path, case: str) -> None:
    exchanges, requests, expected = CASES[case]
    assert await bodies(await replayer_of(tmp_path, *exchanges, ignored=["n"]), *requests) == expected


async def test_a_later_visit_answers_only_what_earlier_ones_did_not(tmp_path: Path) -> None:
    write_visit(tmp_path, Recorded(A, b"1"), Recorded(B, None, status=-1, failure="net::ERR_CONNECTION_RESET"))
    write_visit(tmp_path, Recorded(A, b"2"), Recorded(A, b"3"), Recorded(B, b"b"), clock_ms=CLOCK_MS + 1, visit=1)
    replayer = await HARReplayer.open(tmp_path, TASK)
    assert await bodies(replayer, A, A, B) == [b"1", b"1", b"b"]
    assert replayer.clock_ms == CLOCK_MS


async def test_named_parameters_are_ignored_only_where_nothing_matches_with_them(tmp_path: Path) -> None:
    search = Recorded(B, b"found", method="POST", posted=b"words=red+shoe&token=1", posted_type=FORM_TYPE)
    first, second = Recorded(f"{A}?page=1&_=1", b"first"), Recorded(f"{A}?page=1&_=2", b"second")
    other = Recorded(f"{A}?page=2&utm_source=x", b"other")
    ignoring = await replayer_of(tmp_path, first, second, other, search, ignored=["_", "utm_*", "token"])
    assert await bodies(ignoring, second.url, first.url) == [b"second", b"first"]
    volatile = f"{A}?page=1&_=77", f"{A}?page=1&_=78", f"{A}?_=79&page=1", f"{A}?page=2", f"{A}?page=3&_=1"
    assert await bodies(ignoring, *volatile) == [b"first", b"second", b"second", b"other", None]
    form = ReplayRequest("POST", B, f"{FORM_TYPE}; charset=UTF-8", b"words=red+shoe&token=9")
    another = ReplayRequest("POST", B, FORM_TYPE, b"words=blue+shoe&token=9")
    assert await bodies(ignoring, form, another) == [b"found", None]
    assert await bodies(await HARReplayer.open(tmp_path, TASK), *volatile[:2], form) == [None, None, None]


async def test_requests_that_were_given_up_keep_their_place_and_do_not_repeat(tmp_path: Path) -> None:
    never, unread, stream, broken = (f"http://a.test/{name}" for name in ("never", "unread", "stream", "broken"))
    write_visit(
        tmp_path, Recorded(A, None, status=-1, failure=GIVEN_UP), Recorded(A, b"1"), Recorded(A, **HALF),
        Recorded(B, None, status=-1, failure=GIVEN_UP), Recorded(never, None, status=-1),
        Recorded(unread, None, headers=(("Content-Length", "0"),), failure=GIVEN_UP),
        Recorded(stream, None, headers=(("content-type", "text/event-stream"),)),
        Recorded(broken, None, status=-1, failure="net::ERR_CONNECTION_REFUSED"),
    )  # fmt: skip
    write_visit(tmp_path, Recorded(A, b"2"), Recorded(B, b"b"), visit=1)
    replayer = await HARReplayer.open(tmp_path, TASK)
    found = await responses(replayer, A, A, A, A, B, never, unread, stream, broken)
    seen = [response and (response.status, response.body, response.given_up) for response in found]
    nothing, one = (FAILED_STATUS, b"", True), (200, b"1", False)
    assert seen[:5] == [nothing, one, (200, b"", True), one, (200, b"b", False)]
    assert seen[5:] == [nothing, (200, b"", False), (204, b"", False), (FAILED_STATUS, b"", False)]


async def test_cookies_and_dates_are_moved_by_the_age_of_the_recording_and_framing_is_dropped(tmp_path: Path) -> None:
    now, ago = int(time.time()), int(time.time()) - CLOCK_MS // 1000
    dates = {"Date": now - ago, "Expires": now - ago + 600, "Last-Modified": now - ago - 3600}
    sent = (
        ("Content-Encoding", "br"), ("Transfer-Encoding", "chunked"), ("Alt-Svc", "h3"), ("X-Own", "kept"),
        ("Set-Cookie", "a=1; Expires=Sun, 13 Sep 2020 12:36:40 GMT; Path=/\nb=2; Max-Age=60"),  # in ten minutes
        ("Set-Cookie", "c=3; expires=whenever"),
    )  # fmt: skip
    aged = tuple((name, formatdate(moment, usegmt=True)) for name, moment in dates.items())
    for_head = ("Content-Length", "77"), ("Content-Encoding", "gzip"), ("Connection", "close")
    replayer = await replayer_of(
        tmp_path, Recorded(A, headers=sent), Recorded(A, method="HEAD", headers=for_head), Recorded(B, headers=aged),
        Recorded(f"{B}?", headers=(("Expires", "0"),)),
    )  # fmt: skip
    found = await responses(replayer, A, ReplayRequest("HEAD", A), B, f"{B}?")
    headers = [response.headers for response in found if response is not None]
    (_, first), (_, second), (_, third) = headers[0][1:]
    assert [name for name, _ in headers[0]] == ["x-own", "set-cookie", "set-cookie", "set-cookie"]
    left = parsedate_to_datetime(first.split("; ")[1].removeprefix("Expires=")).timestamp() - time.time()
    assert 590 < left < 610
    assert first.endswith("; Path=/")
    assert (second, third) == ("b=2; Max-Age=60", "c=3; expires=whenever")
    assert headers[1] == (("content-length", "77"), ("content-encoding", "gzip"))  # of what it stands for
    moments = {name: parsedate_to_datetime(value).timestamp() for name, value in headers[2]}
    assert moments["date"] == pytest.approx(now, abs=10)
    assert moments["expires"] - moments["date"] == 600
    assert moments["date"] - moments["last-modified"] == 3600
    assert headers[3] == (("expires", "0"),)


async def test_a_missing_or_damaged_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match=r"web/test has no archive web_test-\w+\.0\.zip in .*; record it first"):
        await HARReplayer.open(tmp_path, TASK)
    whole = write_visit(tmp_path, Recorded(A, b"text")).read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"no archive"):
        visit_path(tmp_path, TASK, 0).write_bytes(broken)
        with pytest.raises(NotRecorded, match=r"\.0\.zip cannot be read: .*; remove it and record the task again"):
            await HARReplayer.open(tmp_path, TASK)


def test_a_multipart_form_is_compared_without_its_boundary() -> None:
    def key(method: str, url: str, boundary: str, body: bytes) -> RequestKey:
        return ReplayRequest(method, url, f"multipart/form-data; boundary={boundary}", body).key

    first = key("POST", "http://a.test/#x", "b1", b"--b1 word --b1")
    assert first == key("POST", "http://a.test/", "b2", b"--b2 word --b2")
    assert first != key("POST", "http://a.test/", "b2", b"--b2 another --b2")


async def test_contradictory_settings_and_missing_folders_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"browser.record=a and browser.replay=b are both set; leave one of"):
        BrowserConfig(record="a", replay="b").check()
    for settings, message in (
        ({"record": "/proc"}, "browser.record=/proc cannot be written: "),
        ({"replay": str(tmp_path / "none")}, "is not a folder; record one with browser.record"),
    ):
        with pytest.raises(ConfigError, match=message):
            BrowserPool(BrowserConfig(**settings), {}, 1)  # type: ignore[arg-type]


def test_a_task_id_becomes_a_plain_file_name() -> None:
    names = {har_name(replace(TASK, id=text)) for text in ("a/b", "a_b", "../a b", "é" * 500, ".")}
    assert len(names) == 5
    assert all("/" not in name and not name.startswith(".") and len(name) < 100 for name in names)


@asynccontextmanager
async def replaying(folder: Path, *exchanges: Recorded, **settings: object) -> AsyncIterator[NetworkAccess]:
    write_visit(folder, *exchanges)
    async with open_network(replay=str(folder), **settings) as network:
        network.replayer = await HARReplayer.open(folder, TASK)
        yield network


async def ask_over_tls(network: NetworkAccess, host: str, request: str) -> bytes:
    """Send a request with Connection: close through a tunnel."""
    reader, writer = await asyncio.open_connection("127.0.0.1", network.port)
    writer.write(f"CONNECT {host}:443 HTTP/1.1\r\nHost: {host}:443\r\n\r\n".encode())
    assert " 200 " in await head_of(reader)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    await writer.start_tls(context, server_hostname=host)
    writer.write(request.encode())
    try:
        return await rest_of(reader)
    finally:
        writer.close()


async def test_a_request_that_failed_fails_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.2)
    for failure in ("net::ERR_NAME_NOT_RESOLVED", GIVEN_UP):
        async with replaying(tmp_path, Recorded(PAGE, None, status=-1, failure=failure)) as network:
            assert await ask(network, get(PAGE)) == b""
            assert not network.refused


async def test_pages_of_other_origins_get_the_permission_they_ask_for(tmp_path: Path) -> None:
    async with replaying(tmp_path, Recorded(PAGE)) as network:
        wanted = "Origin: https://b.test", "Access-Control-Request-Method: PUT", "Access-Control-Request-Headers: x-own"
        text = (await ask(network, get(PAGE, *wanted).replace("GET", "OPTIONS"))).decode()
        assert text.startswith("HTTP/1.1 204 ")
        for header in ("origin: https://b.test", "methods: PUT", "headers: x-own"):
            assert f"access-control-allow-{header}\r\n" in text
        assert " 403 " in (await ask(network, get(PAGE).replace("GET", "OPTIONS"))).decode()


async def test_sockets_are_named_and_counted(tmp_path: Path) -> None:
    async with replaying(tmp_path, Recorded(PAGE)) as network:
        request = get("/chat", "Upgrade: websocket", "Sec-WebSocket-Key: x")
        found = await ask_over_tls(network, "b.test", request)
        assert b"WebSocket https://b.test/chat was not recorded" in found
        assert network.refused == {"not_recorded": 1}
