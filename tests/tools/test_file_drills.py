"""The short forms of the drills of files; their long forms are `make soak`."""

from __future__ import annotations

import pytest

from tools.drills import histories

SHORT_OR_LONG = pytest.mark.parametrize(
    "quick", [True, pytest.param(False, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])], ids=["short", "long"]
)


@SHORT_OR_LONG
def test_an_update_costs_the_same_at_the_end_of_a_long_run(quick: bool) -> None:
    found = histories.measure(quick)
    assert not found.problems, found.figures
