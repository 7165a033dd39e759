"""A real engine's routed experts: those of every token, prefix-cache hits included, and replayed by Megatron.

Slow, as an engine takes several weight updates in flight: only then are tokens computed twice.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megatron_webrl.trainer.data.batching import TrainingSample
from tools.bench import routing_replay as replay

pytestmark = pytest.mark.only_v2


def test_every_token_has_the_experts_of_the_trainer_and_replay_reproduces_log_probabilities(tmp_path: Path) -> None:
    """Also tokens whose keys and values the prefix cache had, and while updates were in flight."""
    figures = replay.measure(tmp_path, "float32")
    samples: list[TrainingSample] = pickle.loads((tmp_path / replay.SAMPLES).read_bytes())
    assert figures["cached_prompt_tokens"] > 0.3
    assert figures["equal"] == 1
    assert figures["compared"] > 500
    for sample in samples:
        assert sample.experts is not None
        assert sample.experts.shape == (sample.length - 1, 4, 4)
        assert sample.experts.max() < 16
        assert (np.diff(np.sort(sample.experts)) > 0).all()  # no expert twice
    # The last token of a sequence is the only one that is not replayed.
    for way in ("with", "without"):
        assert figures[way]["logprob_mismatch/tokens/lag_0"] > 100
        assert figures[way]["logprob_mismatch/tokens/lag_1"] > 20
        assert figures[way]["logprob_mismatch/largest/lag_0"] < 1e-3
    assert 0.98 < figures["replayed_tokens"] / figures["tokens"] < 1
    assert figures["expert_bytes_per_token"] == 16
