"""Which recorded response answers a request."""

from __future__ import annotations

import time
from email.utils import formatdate, parsedate_to_datetime
from pathlib import Path

import pytest

from megatron_webrl.browser.egress.har import FAILED_STATUS, FORM_TYPE, HARReplayer, ReplayRequest, visit_path
from megatron_webrl.browser.errors import NotRecorded
from tests.browser.egress.recorded_visits import CLOCK_MS, TASK, Recorded, write_visit

A, B = "http://a.test/a", "http://a.test/b"


async def bodies(replayer: HARReplayer, *requests: str | ReplayRequest) -> list[bytes | None]:
    """The body of the response to each request, a URL being a GET; None: not recorded."""
    found = []
    for request in requests:
        response = await replayer.find(ReplayRequest("GET", request) if isinstance(request, str) else request)
        found.append(None if response is None else response.body)
    return found


async def test_responses_come_in_the_recorded_order_and_the_last_one_repeats(tmp_path: Path) -> None:
    write_visit(tmp_path, 0, Recorded(A, b"1"), Recorded(B, b"b"), Recorded(A, b"2"))
    replayer = await HARReplayer.open(tmp_path, TASK)
    assert await bodies(replayer, A, A, f"{A}#part", B, B) == [b"1", b"2", b"2", b"b", b"b"]
    assert await bodies(replayer, "http://a.test/c", f"{A}?x=1") == [None, None]
    assert replayer.clock_ms == CLOCK_MS


async def test_a_later_visit_answers_only_what_earlier_ones_did_not(tmp_path: Path) -> None:
    write_visit(tmp_path, 0, Recorded(A, b"1"), Recorded(B, None, status=-1, failure="net::ERR_CONNECTION_RESET"))
    write_visit(tmp_path, 1, Recorded(A, b"2"), Recorded(A, b"3"), Recorded(B, b"b"), clock_ms=CLOCK_MS + 1)
    replayer = await HARReplayer.open(tmp_path, TASK)
    assert await bodies(replayer, A, A, B) == [b"1", b"1", b"b"]
    assert replayer.clock_ms == CLOCK_MS


async def test_methods_bodies_and_ranges_tell_requests_apart(tmp_path: Path) -> None:
    write_visit(
        tmp_path, 0,
        Recorded(A, b"one", method="POST", posted=b"\xff\x00"), Recorded(A, b"two", method="POST", posted=b"\xfe\x00"),
        Recorded(A, b"ab", status=206, request_headers={"Range": "bytes=0-1"}),
    )  # fmt: skip
    replayer = await HARReplayer.open(tmp_path, TASK)
    kind = "application/octet-stream"
    two, one, none = (ReplayRequest("POST", A, kind, body) for body in (b"\xfe\x00", b"\xff\x00", b""))
    part = ReplayRequest("GET", A, byte_range="bytes=0-1")
    put = ReplayRequest("PUT", A, kind, b"\xff\x00")
    assert await bodies(replayer, two, one, none, put, A, part) == [b"two", b"one", None, None, None, b"ab"]


async def test_named_parameters_are_ignored_only_where_nothing_matches_with_them(tmp_path: Path) -> None:
    search = Recorded(B, b"found", method="POST", posted=b"words=red+shoe&token=1", posted_type=FORM_TYPE)
    write_visit(
        tmp_path, 0, Recorded(f"{A}?page=1&_=1", b"first"), Recorded(f"{A}?page=1&_=2", b"second"),
        Recorded(f"{A}?page=2&utm_source=x", b"other"), search,
    )  # fmt: skip
    ignored = await HARReplayer.open(tmp_path, TASK, ["_", "utm_*", "token"])
    exact = f"{A}?page=1&_=2", f"{A}?page=1&_=1"
    assert await bodies(ignored, *exact) == [b"second", b"first"]
    volatile = f"{A}?page=1&_=77", f"{A}?page=1&_=78", f"{A}?_=79&page=1", f"{A}?page=2", f"{A}?page=3&_=1"
    assert await bodies(ignored, *volatile) == [b"first", b"second", b"second", b"other", None]
    form = ReplayRequest("POST", B, f"{FORM_TYPE}; charset=UTF-8", b"words=red+shoe&token=9")
    another = ReplayRequest("POST", B, FORM_TYPE, b"words=blue+shoe&token=9")
    assert await bodies(ignored, form, another) == [b"found", None]
    assert await bodies(await HARReplayer.open(tmp_path, TASK), *volatile[:2], form) == [None, None, None]


async def test_special_responses_are_replayed_as_a_page_saw_them(tmp_path: Path) -> None:
    stream = (("content-type", "text/event-stream"),)
    write_visit(
        tmp_path, 0,
        Recorded(A, b"copy"), Recorded(A, None, status=304), Recorded(A, b"changed"),  # a copy that was still right
        Recorded("http://a.test/stream", None, headers=stream),
        Recorded("http://a.test/lost", None),
        Recorded("http://a.test/broken", None, status=-1, failure="net::ERR_CONNECTION_REFUSED"),
        Recorded("ws://a.test/", None, status=101),
    )  # fmt: skip
    replayer = await HARReplayer.open(tmp_path, TASK)
    assert await bodies(replayer, A, A, A) == [b"copy", b"copy", b"changed"]
    assert await bodies(replayer, "http://a.test/lost", "ws://a.test/") == [None, None]
    streamed = await replayer.find(ReplayRequest("GET", "http://a.test/stream"))
    broken = await replayer.find(ReplayRequest("GET", "http://a.test/broken"))
    assert streamed is not None
    assert broken is not None
    assert (streamed.status, broken.status) == (204, FAILED_STATUS)


async def test_cookies_live_as_long_as_they_did_and_framing_is_dropped(tmp_path: Path) -> None:
    headers = (
        ("Content-Encoding", "br"), ("Transfer-Encoding", "chunked"), ("Alt-Svc", "h3"), ("X-Own", "kept"),
        ("Set-Cookie", "a=1; Expires=Sun, 13 Sep 2020 12:36:40 GMT; Path=/\nb=2; Max-Age=60"),
        ("Set-Cookie", "c=3; expires=whenever"),
    )  # fmt: skip
    write_visit(tmp_path, 0, Recorded(A, b"text", headers=headers))  # ten minutes before the first cookie expires
    response = await (await HARReplayer.open(tmp_path, TASK)).find(ReplayRequest("GET", A))
    assert response is not None
    names = [name for name, _ in response.headers]
    assert names == ["x-own", "set-cookie", "set-cookie", "set-cookie"]
    first, second, third = (value for name, value in response.headers if name == "set-cookie")
    left = parsedate_to_datetime(first.split("; ")[1].removeprefix("Expires=")).timestamp() - time.time()
    assert 590 < left < 610
    assert first.endswith("; Path=/")
    assert (second, third) == ("b=2; Max-Age=60", "c=3; expires=whenever")


async def test_responses_from_the_browsers_cache_take_no_place_in_the_order(tmp_path: Path) -> None:
    """They count where nothing else was recorded, as for a response whose own body was lost."""
    write_visit(
        tmp_path, 0, Recorded(A, b"1"), Recorded(A, b"1", from_cache=True), Recorded(A, b"2"),
        Recorded(B, None), Recorded(B, b"copy", from_cache=True),
    )  # fmt: skip
    assert await bodies(await HARReplayer.open(tmp_path, TASK), A, A, A, B) == [b"1", b"2", b"2", b"copy"]


async def test_headers_of_http2_tell_what_came_from_a_server(tmp_path: Path) -> None:
    sent = {":authority": "a.test"}
    write_visit(
        tmp_path, 0, Recorded(A, b"1", from_cache=True, request_headers=sent), Recorded(A, b"1", from_cache=True),
        Recorded(A, b"2", from_cache=True, request_headers=sent),
    )  # fmt: skip
    assert await bodies(await HARReplayer.open(tmp_path, TASK), A, A) == [b"1", b"2"]


async def test_dates_of_an_old_recording_are_moved_by_its_age(tmp_path: Path) -> None:
    year = 365 * 86400
    now = int(time.time())
    dates = {"Date": now - year, "Expires": now - year + 600, "Last-Modified": now - year - 3600}
    headers = tuple((name, formatdate(moment, usegmt=True)) for name, moment in dates.items())
    write_visit(
        tmp_path, 0, Recorded(A, headers=headers), Recorded(B, headers=(("Expires", "0"),)),
        clock_ms=(now - year) * 1000,
    )  # fmt: skip
    replayer = await HARReplayer.open(tmp_path, TASK)
    response, other = [await replayer.find(ReplayRequest("GET", url)) for url in (A, B)]
    assert response is not None
    assert other is not None
    moments = {name: parsedate_to_datetime(value).timestamp() for name, value in response.headers}
    assert moments["date"] == pytest.approx(now, abs=10)
    assert moments["expires"] - moments["date"] == 600
    assert moments["date"] - moments["last-modified"] == 3600
    assert other.headers == (("expires", "0"),)


async def test_a_body_that_was_not_recorded_equals_any_that_no_other_request_has(tmp_path: Path) -> None:
    blob = {"Content-Length": "9"}
    write_visit(
        tmp_path, 0, Recorded(A, b"blob", method="POST", request_headers=blob),
        Recorded(A, b"text", method="POST", posted=b"words"), Recorded(A, b"none", method="POST"),
        Recorded(f"{B}?n=1", b"upload", method="POST", request_headers=blob),
    )  # fmt: skip
    replayer = await HARReplayer.open(tmp_path, TASK, ["n"])
    words, picture, empty = (ReplayRequest("POST", A, body=body) for body in (b"words", b"a picture", b""))
    assert await bodies(replayer, words, picture, empty) == [b"text", b"blob", b"none"]
    upload, nothing = (ReplayRequest("POST", f"{B}?n=2", body=body) for body in (b"a picture", b""))
    assert await bodies(replayer, upload, nothing, ReplayRequest("PUT", A, body=b"1")) == [b"upload", None, None]


async def test_a_request_that_was_given_up_keeps_its_place_and_does_not_repeat(tmp_path: Path) -> None:
    given_up = Recorded(A, None, status=-1, failure="net::ERR_ABORTED")
    never = "http://a.test/never"
    write_visit(
        tmp_path, 0, given_up, Recorded(A, b"1"), Recorded(A, None, failure="net::ERR_ABORTED"),
        Recorded(B, None, status=-1, failure="net::ERR_ABORTED"), Recorded(never, None, status=-1),
        Recorded("http://a.test/unread", None, headers=(("Content-Length", "0"),), failure="net::ERR_ABORTED"),
    )  # fmt: skip
    write_visit(tmp_path, 1, Recorded(A, b"2"), Recorded(B, b"b"))
    replayer = await HARReplayer.open(tmp_path, TASK)
    found = [await replayer.find(ReplayRequest("GET", url)) for url in (A, A, A, A, B, never, "http://a.test/unread")]
    seen = [response and (response.status, response.body, response.given_up) for response in found]
    nothing, one = (FAILED_STATUS, b"", True), (200, b"1", False)
    assert seen == [nothing, one, (200, b"", True), one, (200, b"b", False), nothing, (200, b"", False)]


async def test_a_copy_in_the_cache_is_of_a_response_that_was_not_given_up(tmp_path: Path) -> None:
    half = {"content": None, "failure": "net::ERR_ABORTED"}
    write_visit(
        tmp_path, 0, Recorded(A, b"1"), Recorded(A, **half), Recorded(A, None, status=304),
        Recorded(B, **half), Recorded(B, b"whole", from_cache=True),
    )  # fmt: skip
    replayer = await HARReplayer.open(tmp_path, TASK)
    assert await bodies(replayer, A, A, A, B, B) == [b"1", b"", b"1", b"", b"whole"]


async def test_a_response_to_head_keeps_the_length_of_what_it_stands_for(tmp_path: Path) -> None:
    headers = (("Content-Length", "77"), ("Content-Encoding", "gzip"), ("Connection", "close"))
    write_visit(tmp_path, 0, Recorded(A, method="HEAD", headers=headers))
    response = await (await HARReplayer.open(tmp_path, TASK)).find(ReplayRequest("HEAD", A))
    assert response is not None
    assert response.headers == (("content-length", "77"), ("content-encoding", "gzip"))


async def test_a_missing_or_damaged_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match=r"web/test has no archive web_test-\w+\.0\.zip in .*; record it first"):
        await HARReplayer.open(tmp_path, TASK)
    whole = write_visit(tmp_path, 0, Recorded(A, b"text")).read_bytes()
    for broken in (b"", whole[: len(whole) // 2], b"no archive"):
        visit_path(tmp_path, TASK, 0).write_bytes(broken)
        with pytest.raises(NotRecorded, match=r"\.0\.zip cannot be read: .*; remove it and record the task again"):
            await HARReplayer.open(tmp_path, TASK)
