"""`python -m tools.drills.framing`: only declared exceptions from URL parsing, only canonical HTTP from the proxy.

The properties are those of the tests (tests/browser/egress/), with new random cases: every text is refused as a URL
(EgressDenied) or has a stable reading; of a response, the browser gets what h11 reads, or nothing complete; of a
request, a server gets canonical bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.browser.egress.egress_policy import EgressDenied, normalize_host, parse_endpoint, split_url
from tests.browser.egress import test_framing as framing
from tools.drills.report import Findings, run
from tools.drills.ssrf_corpus import corpus

SECONDS, QUICK_SECONDS = 600.0, 5.0  # for each of the three properties
ROUND = 400  # cases between two looks at the clock

_PIECES = st.sampled_from([
    "http", "https", "ws", "file", "://", ":", "//", "/", "\\", "@", "#", "?", "[", "]", "%", "%2e", "%00", ".", "..",
    "127.0.0.1", "0x7f", "0177", "2130706433", "::1", "::ffff:", "localhost", "xn--", "a.test", "80", "65536", "-1",
    "\u3002", "\uff11", "\u0130", "\x00", "\t", "\n", " ", "\ud800",
])  # fmt: skip
_MUTATED = st.builds(
    lambda url, place, piece: url[:place] + piece + url[place:], st.sampled_from(corpus()), st.integers(0, 60), _PIECES
)
URLS = st.one_of(st.lists(_PIECES, max_size=12).map("".join), st.text(max_size=60), _MUTATED)


def check_url(text: str) -> None:
    """A URL is refused, or its endpoint reads the same a second time."""
    for read in (normalize_host, partial(parse_endpoint, default_port=80), split_url):
        try:
            found: Any = read(text)
        except EgressDenied:
            continue
        if read is split_url:
            scheme, endpoint, rest = found
            assert split_url(f"{scheme}://{endpoint}{rest}") == found, text


PROPERTIES: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {
    "URLs": (check_url, (URLS,)),
    "responses": (
        framing.test_the_browser_receives_what_h11_reads_or_no_complete_response.hypothesis.inner_test,  # type: ignore[attr-defined]
        (framing.RESPONSES, st.integers(1, 9)),
    ),
    "requests": (
        framing.test_a_server_receives_canonical_requests_only.hypothesis.inner_test,  # type: ignore[attr-defined]
        (framing.REQUESTS,),
    ),
}


def check_for(seconds: float, check: Callable[..., None], strategies: tuple[Any, ...]) -> int:
    """Check random cases; returns their number. Raises what `check` raises."""
    cases, deadline = 0, time.monotonic() + seconds

    @settings(max_examples=ROUND, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.tuples(*strategies))
    def some_cases(arguments: tuple[Any, ...]) -> None:
        nonlocal cases
        cases += 1
        check(*arguments)

    while time.monotonic() < deadline:
        some_cases()
    return cases


def measure(quick: bool) -> Findings:
    found = Findings()
    for name, (check, strategies) in PROPERTIES.items():
        try:
            cases = check_for(QUICK_SECONDS if quick else SECONDS, check, strategies)
            found.figures[f"random {name}"] = cases
        except Exception as error:  # whatever it is, it is not declared
            notes = " ".join(getattr(error, "__notes__", []))  # the case, made as small as possible
            found.problems.append(f"{name}: {type(error).__name__}: {error} {notes}")
    return found


if __name__ == "__main__":
    sys.exit(run("framing", __doc__ or "", measure))
