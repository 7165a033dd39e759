"""The context policies by name."""

from __future__ import annotations

from megatron_webrl.config import ContextConfig
from megatron_webrl.model.processing import Processor
from megatron_webrl.rollout.contexts.append import AppendContext
from megatron_webrl.rollout.contexts.base import Context
from megatron_webrl.rollout.contexts.sliding import SlidingContext
from megatron_webrl.rollout.toolset import COORDINATES, Toolset

_POLICIES: dict[str, type[Context]] = {"sliding": SlidingContext, "append": AppendContext}


def make_context(processor: Processor, settings: ContextConfig, limit: int, toolset: Toolset = COORDINATES) -> Context:
    """An episode's conversation by `settings.policy`; `limit`: tokens that a prompt may have, images expanded."""
    return _POLICIES[settings.policy](processor, settings, limit, toolset)
