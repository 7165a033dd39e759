"""Prompts of the compact form, on which models/quickstart was trained."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import make_context
from megatron_webrl.rollout.toolset import format_tool_call
from megatron_webrl.types import Action
from tests.rollout.conversations import HOSTILE, observation_of, response_of, texts

ACTIONS = (
    Action("left_click", coordinate=(500, 320)),
    Action("type", coordinate=(20, 1000), text=f'say "ü" {HOSTILE}'),
    Action("scroll", direction="down"),
    Action("wait", time=1.5),
    Action("go_back"),
    Action("navigate", url="http://a.localhost/b"),
    Action("answer", text="a" * 100),
)
TOKENS = "e56ceb8eeaddc5ce71949fb041a03f037e038afd74b9e78f981ffdc766ae295b"  # SHA-256 of the tokens of all prompts


def test_prompts_of_the_trained_tiny_model_keep_every_token(tiny_model: Path) -> None:
    processor = Processor.load(tiny_model)
    context = make_context(processor, ContextConfig(history_turns=1, response_format="bare", compact=True), 100_000)
    context.start_episode(f"Click it. {HOSTILE}", observation_of(title=HOSTILE))
    prompts = [context.build_prompt()]
    for step, action in enumerate(ACTIONS, 1):
        page = observation_of(step, HOSTILE, changed=bool(step % 2), error=HOSTILE if step == 3 else None)
        answer = f"<think>a thought</think>Action: number {step}\n{format_tool_call(action)}"
        context.add_step(response_of(processor, answer), action, None, page)
        prompts.append(context.build_prompt())
    context.add_step(response_of(processor, 'Memory: {"a": 1}\nAction: b'), None, "no_tool_call", observation_of(9))
    prompts.append(context.build_prompt())
    assert texts(processor, prompts[1])[1] == (
        f"Task: Click it. {processor.escape_special_tokens(HOSTILE)}\nEarlier steps:\n"
        "Step 1: left_click [500, 320] -> page changed\n<IMAGE>"
    )
    digest = hashlib.sha256(b"".join(prompt.token_ids.astype("<i4").tobytes() for prompt in prompts)).hexdigest()
    assert digest == TOKENS
    assert np.concatenate([prompt.image_indices for prompt in prompts]).tolist() == [*range(8), 7]
