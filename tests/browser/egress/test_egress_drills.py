"""The short forms of the drills of the egress proxy; their long forms are `make soak`."""

from __future__ import annotations

import pytest

from tools.drills import egress, framing

SHORT_OR_LONG = pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])], ids=["short", "long"]
)


@SHORT_OR_LONG
@pytest.mark.skipif(bool(egress.why_not()), reason=egress.why_not() or "-")
def test_no_packet_of_a_hostile_page_leaves_for_a_forbidden_address(quick: bool) -> None:
    found = egress.measure(quick)
    assert not found.problems, found.figures


@SHORT_OR_LONG
def test_random_urls_and_messages_raise_only_what_is_declared(quick: bool) -> None:
    found = framing.measure(quick)
    assert not found.problems
    assert all(cases > 100 for cases in found.figures.values()), found.figures
