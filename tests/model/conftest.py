"""Results of one pair of gloo processes, shared by all parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import spawn
from tests.model import ranks, tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small models, "untied" and "tied"."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def references(folder: Path) -> dict[str, Any]:
    """The same models in transformers."""
    return {
        name: tiny.write_model(folder / name, shape, seed) for seed, (name, shape) in enumerate(ranks.MODELS.items())
    }


@pytest.fixture(scope="session")
def found(references: dict[str, Any], folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """(tensor-parallel size, rank) -> results of that rank."""
    spawn(ranks.run, str(folder))
    return {(size, rank): torch.load(folder / f"found-{size}-{rank}.pt") for size in (2, 1) for rank in (0, 1)}
