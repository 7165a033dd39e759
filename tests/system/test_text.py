"""Texts of messages and metric names."""

from __future__ import annotations

import pytest
from mlflow.utils.validation import _validate_metric_name

from megatron_webrl.system.text import first_line, metric_label


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
