"""Create the context policy that the settings name."""

from __future__ import annotations

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts.append import AppendContext
from megatron_webrl.rollout.contexts.base import PromptContext
from megatron_webrl.rollout.contexts.sliding import SlidingContext
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset

POLICIES: dict[str, type[PromptContext]] = {"sliding": SlidingContext, "append": AppendContext}


def make_context(
    processor: Processor, settings: ContextConfig, max_prompt_tokens: int, toolset: Toolset = COORDINATE_TOOLSET
) -> PromptContext:
    """The context of one episode by `settings.policy`; the token limit counts expanded image placeholders."""
    return POLICIES[settings.policy](processor, settings, max_prompt_tokens, toolset)
