"""Differences between backends, and what of them fails."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_webrl.checks.model import EXACT, compare, judge
from megatron_webrl.checks.model_scores import Scores
from megatron_webrl.checks.samples import ModelSample
from megatron_webrl.model.processor import Processor

ROUNDED = ("transformers, bfloat16", "megatron, bfloat16")


def found(*logprobs: list[float]) -> Scores:
    return Scores(tuple(np.array(values, np.float32) for values in logprobs), (), 1.0, 1)


@pytest.fixture
def samples(processor: Processor) -> list[ModelSample]:
    empty = np.zeros(0, np.int32)
    return [
        ModelSample(name, empty, empty, (), np.zeros((0, 3), np.int32), processor.encode_response(text)[:count])
        for name, text, count in (("one", "click", 1), ("two", "wait and see", 3))
    ]


def test_the_worst_token_is_named(processor: Processor, samples: list[ModelSample]):
    difference = compare(found([-1.0], [-2.0, -3.0, -4.0]), found([-1.1], [-2.0, -3.5, -4.0]), samples, processor)
    assert difference.largest == pytest.approx(0.5)
    assert difference.mean == pytest.approx(0.6 / 4, rel=1e-5)
    assert difference.tokens == 4
    text = processor.decode(samples[1].response_token_ids[1:2])
    assert difference.worst == f"two, token 1 {text!r}: -3.0000, -3.5000"


def test_every_pair_is_compared_and_nan_is_beyond_every_tolerance(processor: Processor, samples: list[ModelSample]):
    scores = {
        "a": found([-1.0], [-2.0, -3.0, -4.0]),
        "b": found([-9.0], [-2.0, float("nan"), -4.0]),
        "c": found([-1.0], [-2.0, -3.0, -4.25]),
    }
    results = {each.name: each for each in judge(scores, samples, processor, "float32", 0.3)}
    statuses = {name: each.status for name, each in results.items() if name.endswith("largest difference")}
    assert statuses == {
        "a - b, 4 tokens: largest difference": "failed",
        "a - c, 4 tokens: largest difference": "passed",
        "b - c, 4 tokens: largest difference": "failed",
    }
    assert "two, token 1" in results["a - b, 4 tokens: largest difference"].note


@pytest.mark.parametrize(("shift", "status"), [(0.05, "passed"), (0.5, "failed"), (float("nan"), "failed")])
def test_bfloat16_is_judged_by_the_error_of_transformers_in_bfloat16(
    processor: Processor, samples: list[ModelSample], shift: float, status: str
):
    scores = {
        EXACT: found([-1.0], [-2.0, -3.0, -4.0]),
        ROUNDED[0]: found([-1.1], [-2.1, -3.1, -4.1]),
        ROUNDED[1]: found([-1.0 - shift], [-2.0, -3.0 + shift, -4.0]),
    }
    results = {each.name: each for each in judge(scores, samples, processor, "bfloat16", None)}
    assert {results[f"{figure} error of {ROUNDED[1]}"].status for figure in ("mean", "quantile")} == {status}
