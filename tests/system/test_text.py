"""The first line of an exception's message."""

from __future__ import annotations

import pytest

from megatron_webrl.system.text import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("one\ntwo"), "one"), (ValueError("one"), "one"), (TimeoutError(), "TimeoutError")],
)
def test_an_exception_has_a_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
