"""Differences between backends."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from megatron_webrl.checks.parity.backends import BackendScores
from megatron_webrl.checks.parity.report import compare_backends
from megatron_webrl.checks.parity.samples import ParitySample
from megatron_webrl.model.processor import Processor


def found(backend: str, *logprobs: list[float]) -> BackendScores:
    arrays = tuple(np.array(values, np.float32) for values in logprobs)
    return BackendScores(backend, arrays, (), load_seconds=1.0, score_seconds=1.0, peak_bytes=1, processes=1)


@pytest.fixture
def samples(processor: Processor) -> list[ParitySample]:
    empty = np.zeros(0, np.int32)
    return [
        ParitySample(name, empty, empty, (), np.zeros((0, 3), np.int32), processor.encode_response(text)[:count])
        for name, text, count in (("one", "click", 1), ("two", "wait and see", 3))
    ]


def test_every_pair_is_compared_and_the_worst_token_named(processor: Processor, samples: list[ParitySample]):
    backends = [found("a", [-1.0], [-2.0, -3.0, -4.0]), found("b", [-1.1], [-2.0, -3.5, -4.0])]
    backends.append(found("c", [-1.0], [-2.0, -3.0, -4.25]))
    ab, ac, bc = compare_backends(backends, samples, processor)
    assert [each.backends for each in (ab, ac, bc)] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert ab.largest == pytest.approx(0.5)
    assert ab.mean == pytest.approx(0.6 / 4, rel=1e-5)
    assert ab.tokens == 4
    assert (ab.worst.sample, ab.worst.token, ab.worst.logprobs) == ("two", 1, (-3.0, -3.5))
    assert ab.worst.text == processor.decode(samples[1].response_token_ids[1:2])
    assert ab.by_sample == {"one": pytest.approx(0.1, rel=1e-5), "two": pytest.approx(0.5)}
    assert (ac.worst.token, ac.within(0.25), ac.within(0.2)) == (2, True, False)


def test_nan_is_beyond_every_tolerance(processor: Processor, samples: list[ParitySample]):
    (difference,) = compare_backends(
        [found("a", [-1.0], [-2.0, -3.0, -4.0]), found("b", [-9.0], [-2.0, float("nan"), -4.0])], samples, processor
    )
    assert not difference.within(1e9)
    assert (difference.worst.sample, difference.worst.token) == ("two", 1)


def test_a_difference_as_a_dictionary_holds_every_figure(processor: Processor, samples: list[ParitySample]):
    (difference,) = compare_backends(
        [found("a", [-1.0], [-2.0] * 3), found("b", [-1.0], [-2.0] * 3)], samples, processor
    )
    assert set(dataclasses.asdict(difference)) == {"backends", "largest", "mean", "tokens", "worst", "by_sample"}
    assert difference.within(0.0)
