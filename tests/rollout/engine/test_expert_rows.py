"""Rows of experts in vLLM's output, and what a step takes of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.outputs import CompletionOutput

from megatron_webrl.rollout.engine.vllm_engine import _experts
from megatron_webrl.rollout.generator import GenerationError


def output(rows: np.ndarray | None) -> CompletionOutput:
    return CompletionOutput(0, "", [1], None, None, routed_experts=rows)


def test_a_step_takes_the_sparse_layers_of_the_last_computation_and_a_type_with_a_number_for_not_recorded() -> None:
    rows = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)  # tokens, layers, top_k
    for experts, dtype in ((254, np.uint8), (255, np.uint16), (256, np.uint16)):
        text = SimpleNamespace(num_experts=experts, mlp_only_layers=[1], decoder_sparse_step=1)
        found = _experts(output(rows), 2, text)
        np.testing.assert_array_equal(found, rows[3:, [0, 2]])
        assert found.dtype == dtype
        with pytest.raises(GenerationError, match="the experts of 5 of 6 tokens"):
            _experts(output(rows), 6, text)
        assert _experts(output(None), 2, text).shape == (0, 0, 0)
