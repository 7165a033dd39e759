"""Texts of messages and metric names."""

from __future__ import annotations

import pytest
from mlflow.utils.validation import _validate_metric_name

from megatron_webrl.util.text import first_line, metric_label, shorten_middle


@pytest.mark.parametrize(
    ("error", "line"),
    [(ValueError("one\ntwo"), "one"), (ValueError("one"), "one"), (TimeoutError(), "TimeoutError")],
)
def test_an_exception_has_a_first_line(error: Exception, line: str) -> None:
    assert first_line(error) == line


@pytest.mark.parametrize(
    ("text", "label"),
    [("click-test", "click-test"), ("Food & Drink", "Food-Drink"), ("a/b", "a-b"), ("v1.5_x", "v1.5_x"),
     ("all(page, judge)", "all-page-judge"), ("Küche", "Küche"), ("..", "unnamed"), ("", "unnamed")],
)  # fmt: skip
def test_a_metric_label_is_accepted_by_mlflow(text: str, label: str) -> None:
    assert metric_label(text) == label
    _validate_metric_name(f"success_rate/{label}")


@pytest.mark.parametrize(
    ("limit", "shown"),
    [(6, "abcdef"), (5, "abc ... (1 character left out) ... ef"), (1, "a ... (5 characters left out) ... ")],
)
def test_a_text_without_its_middle_says_how_much_is_missing(limit: int, shown: str) -> None:
    assert shorten_middle("abcdef", limit) == shown
