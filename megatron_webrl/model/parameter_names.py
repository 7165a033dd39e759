"""Parameter names: local to one model chunk of a rank, and canonical (numbered over the whole model)."""

from __future__ import annotations

import re

LAYER_PREFIX = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT_INFIX = re.compile(r"\.local_experts\.(\d+)\.")


def canonical_name(name: str, first_layer: int, first_expert: int) -> str:
    """Canonical name of a chunk's parameter, as in the parameter map, from the chunk's first layer and expert."""
    name = LAYER_PREFIX.sub(lambda found: f"decoder.layers.{int(found[1]) + first_layer}.", name)
    return EXPERT_INFIX.sub(lambda found: f".local_experts.{int(found[1]) + first_expert}.", name)
