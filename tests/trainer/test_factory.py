"""Options of a learner that depend on the machine."""

from __future__ import annotations

from pathlib import Path

from tests.gloo import spawn
from tests.trainer import factory_ranks


def test_all_ranks_take_transformer_engine_and_compiled_kernels_or_none(tmp_path: Path) -> None:
    spawn(factory_ranks.choose, str(tmp_path), seconds=120)
    for rank in (0, 1):
        assert (tmp_path / f"layers-{rank}").read_text() == "local local transformer_engine local"
        assert (tmp_path / f"compiled-{rank}").read_text() == "False True False"
