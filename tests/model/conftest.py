"""One pair of gloo processes makes what all parity tests look at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import ranks, tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small models, "untied" and "tied"."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def references(folder: Path) -> dict[str, Any]:
    """The same models in transformers."""
    return {
        name: tiny.write_model(folder / name, seed=seed, **options)
        for seed, (name, options) in enumerate(ranks.MODELS.items())
    }


@pytest.fixture(scope="session")
def found(references: dict[str, Any], folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """(tensor-parallel size, rank) -> what that rank found."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    context = torch.multiprocessing.spawn(ranks.run, args=(str(folder),), nprocs=2, join=False)
    try:
        # join returns after the limit, or when one process has ended; it raises if a process failed.
        for _ in range(2):
            if context.join(timeout=200):
                break
        else:
            pytest.fail("the two ranks did not finish within their limit")
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return {(size, rank): torch.load(folder / f"found-{size}-{rank}.pt") for size in (2, 1) for rank in (0, 1)}
