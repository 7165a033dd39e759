"""A common prefix is computed once with the same result in every parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import spawn
from tests.trainer.data import tree_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, dict[str, Any]]:
    """Layout -> what is computed once -> results of each rank."""
    folder = tmp_path_factory.mktemp("tree")
    spawn(tree_ranks.run, str(folder), str(tiny_model))
    result: dict[str, dict[str, Any]] = torch.load(folder / "found.pt", weights_only=False)
    return result


@pytest.mark.parametrize("layout", tree_ranks.LAYOUTS)
def test_a_layout_computes_the_same_with_a_tree(found: dict[str, dict[str, Any]], layout: str) -> None:
    separate, trees = (found[layout][merged] for merged in tree_ranks.MERGED)
    tokens = [sum(rank["tokens"] for rank in ranks) for ranks in (separate, trees)]
    assert tokens[1] < 0.6 * tokens[0]
    scores = [{mark: score for rank in ranks for mark, score in rank["scores"].items()} for ranks in (separate, trees)]
    assert scores[1] == {mark: pytest.approx(score, rel=1e-6) for mark, score in scores[0].items()}
    assert len(scores[0]) > 20
    for one, other in zip(separate, trees, strict=True):
        assert one["gradients"].keys() == other["gradients"].keys()
        whole = torch.stack([gradient.norm() for gradient in one["gradients"].values()]).norm()
        assert whole > 0
        for name, gradient in one["gradients"].items():
            assert (gradient - other["gradients"][name]).norm() < 1e-6 * whole, name


def test_layouts_agree_with_each_other(found: dict[str, dict[str, Any]]) -> None:
    scores = {
        layout: {mark: score for rank in result["all"] for mark, score in rank["scores"].items()}
        for layout, result in found.items()
    }
    for layout in tree_ranks.LAYOUTS:
        assert scores[layout] == {mark: pytest.approx(score, rel=1e-5) for mark, score in scores["dp2"].items()}
