"""Updates with each loss option do not depend on the layout: context-parallel ranks share responses, others logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from tests.gloo import spawn
from tests.metrics_page import undocumented
from tests.trainer.loss import layout_ranks

Found = dict[str, dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Found:
    """Layout -> loss -> metrics of an update."""
    folder = tmp_path_factory.mktemp("losses")
    spawn(layout_ranks.run, str(folder), str(tiny_model))
    return torch.load(folder / "found.pt")


@pytest.mark.parametrize("layout", ["cp2", "tp2"])
@pytest.mark.parametrize("name", layout_ranks.LOSSES)
def test_an_update_with_each_loss_does_not_depend_on_the_layout(found: Found, name: str, layout: str) -> None:
    metrics, expected = found[layout][name], found["dp2"][name]
    assert metrics == {key: pytest.approx(value, rel=2e-3, abs=1e-6) for key, value in expected.items()}
    assert metrics["gradient_norm"] > 0
    assert undocumented(loss_metrics(metrics)) == []


def test_the_options_take_part(found: Found) -> None:
    """Each mask leaves out some tokens, not all."""
    metrics = found["cp2"]
    for name, masks in {
        "cispo": ("importance_weight_floored", "kl_rejected", "clipped"), "dppo": ("lag_masked", "clipped"),
        "gspo": ("kl_rejected",), "raft_plus_plus": ("clipped",),
    }.items():  # fmt: skip
        for mask in masks:
            assert 0 < metrics[name][mask] < metrics[name]["response_tokens"], (name, mask)
