"""The longest window, and memory saved by recomputation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import spawn
from tests.model import memory_ranks, tiny


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the process, and transformers' logits of the long sample."""
    folder: Path = tmp_path_factory.mktemp("memory")
    reference = tiny.write_model(folder / "long", memory_ranks.LONG, 0)
    tiny.write_model(folder / "sparse", tiny.Shape(experts=4, dense_layers=(1,)), 1)
    spawn(memory_ranks.run, str(folder), ranks=1)
    with torch.no_grad():
        expected = tiny.reference_logits(reference, memory_ranks.long_sample())
    return {**torch.load(folder / "found.pt"), "expected": expected}


def test_a_sample_that_fills_the_longest_window_equals_transformers(found: dict[str, Any]) -> None:
    assert len(memory_ranks.long_sample().tokens) == memory_ranks.LONG.window
    assert found["expected"].std() > 0.3
    torch.testing.assert_close(found["long"], found["expected"], atol=1e-4, rtol=0)


def test_recomputation_keeps_less_for_the_backward_pass(found: dict[str, Any]) -> None:
    saved = found["saved"]
    assert saved["selective"] < 0.75 * saved["none"]
    assert saved["full"] < 0.5 * saved["selective"]
