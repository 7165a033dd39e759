"""Options of a learner that depend on the machine."""

from __future__ import annotations

from pathlib import Path

from tests.gloo import spawn
from tests.trainer import factory_ranks


def test_automatic_layers_are_transformer_engines_only_where_every_rank_has_it(tmp_path: Path) -> None:
    spawn(factory_ranks.choose, str(tmp_path), seconds=120)
    for rank in (0, 1):
        assert (tmp_path / f"layers-{rank}").read_text() == "local local transformer_engine local"
