"""The learner makes the same updates in every layout: metrics and weights, equal on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import spawn
from tests.trainer import layout_ranks

Found = dict[tuple[str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_sparse_model: Path) -> Found:
    """(model, layout) -> observations of each rank."""
    folder = tmp_path_factory.mktemp("layouts")
    models = {"dense": str(tiny_model), "sparse": str(tiny_sparse_model)}
    spawn(layout_ranks.run, str(folder), models, seconds=600)
    return {
        (model, layout): torch.load(folder / f"found-{model}-{layout}.pt", weights_only=False)
        for model, layouts in layout_ranks.LAYOUTS.items()
        for layout in layouts
    }


REPLICAS = ("dp2", f"{layout_ranks.GSPO}dp2")
PAIRS = [
    (model, layout) for model, layouts in layout_ranks.LAYOUTS.items() for layout in layouts if layout not in REPLICAS
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), PAIRS)
def test_an_update_does_not_depend_on_the_layout(found: Found, model: str, layout: str) -> None:
    replicas = REPLICAS[layout.startswith(layout_ranks.GSPO)]
    two_replicas, laid_out = found[model, replicas][0], found[model, layout][0]
    for (metrics, gap), (expected, expected_gap) in zip(laid_out["figures"], two_replicas["figures"], strict=True):
        assert metrics["gradient_norm"] > 0
        assert 0 < metrics["clipped"] < metrics["response_tokens"] < metrics["tokens"]
        assert metrics == {name: pytest.approx(value, rel=1e-3, abs=1e-6) for name, value in expected.items()}
        assert gap.tokens == expected_gap.tokens > 0
        assert gap.largest == pytest.approx(expected_gap.largest, rel=1e-3)
    assert laid_out["weights"].keys() == two_replicas["weights"].keys()
    for name, tensor in laid_out["weights"].items():
        assert float((tensor - two_replicas["weights"][name]).abs().max()) < 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), [*PAIRS, ("dense", "dp2"), ("sparse", "dp2")])
def test_every_rank_returns_the_same_metrics(found: Found, model: str, layout: str) -> None:
    first, second = found[model, layout]
    assert first["figures"] == second["figures"]


@pytest.mark.slow
@pytest.mark.parametrize("layout", layout_ranks.AHEAD)
def test_ranks_that_encode_images_prefetch_them_and_free_their_memory(found: Found, layout: str) -> None:
    held = [rank["held"] for rank in found["dense", layout]]
    assert held == ([0, None] if "pp2" in layout else [0, 0])  # a later pipeline stage encodes none
