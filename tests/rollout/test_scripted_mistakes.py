"""Where scripted episodes depart from their scripts, without a browser."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import format_response, make_context
from megatron_webrl.rollout.demonstrations import (
    GENERIC_SLOT,
    MEMORY_SLOTS,
    ScriptedGenerator,
    extend_memory,
    memory_text,
)
from megatron_webrl.types import Action
from tests.rollout.conversations import observation_of, response_of, texts

WORK = [Action("left_click", coordinate=(20 * n, 500)) for n in range(1, 4)]
SUBMIT = Action("left_click", coordinate=(500, 900))
WAIT = Action("wait", time=0.1)
BARE = ContextConfig(history_turns=1, compact=True)
COMPACT = ContextConfig(history_turns=1, compact=True, response_format="memory_compact")


class Page:
    """A page that needs the actions of WORK in turn and, unless it has no submit button, SUBMIT."""

    def __init__(self, has_submit: bool = True) -> None:
        self.left = list(WORK)
        self.has_submit = has_submit

    async def demonstration(self, premature_submit: bool = False) -> Action:
        if self.has_submit and (premature_submit or not self.left):
            return SUBMIT
        return self.left[0]


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


async def play(processor: Processor, probability: float, seed: str, page: Page) -> list[Action]:
    """Actions of an episode until SUBMIT, or of 40 steps."""
    settings = RolloutConfig(context=BARE, max_new_tokens=64)
    script = ScriptedGenerator(processor, settings, premature_submit_probability=probability, seed=seed)
    context = make_context(processor, BARE, 1000)
    context.start_episode("Work.", observation_of(0))
    prompt, done = context.build_prompt(), list[Action]()
    while SUBMIT not in done and len(done) < 40:
        answer = await script.generate(page, prompt.token_ids, context.screenshots)  # type: ignore[arg-type]
        done.append(next(a for a in (*WORK, SUBMIT) if answer.text == format_response(a, BARE)))
        if len(page.left) > (0 if page.has_submit else 1) and done[-1] == page.left[0]:
            page.left.pop(0)
    return done


async def test_without_mistakes_the_script_is_followed(processor: Processor):
    assert await play(processor, 0.0, "1", Page()) == [*WORK, SUBMIT]


async def test_a_premature_submit_comes_before_the_work(processor: Processor):
    assert await play(processor, 1.0, "1", Page()) == [SUBMIT]


def test_a_scripted_memory_only_grows_and_holds_useful_and_generic_slots():
    counts = []
    for seed in range(200):
        draw, slots, written = random.Random(seed), list[str](), [""]
        for action in (*WORK, WAIT):
            written.append(memory_text(slots := extend_memory(slots, action, draw)))
        assert all(later.startswith(earlier) for earlier, later in pairwise(written))
        assert [slot for slot in slots if slot != GENERIC_SLOT] == [*["left_click"] * 3, "wait"]
        counts.append(slots.count(GENERIC_SLOT) / 4)
    assert sum(counts) / len(counts) == pytest.approx(0.5, abs=0.06)
    for _ in range(20):
        slots = extend_memory(slots, SUBMIT, draw)
    assert len(slots) == MEMORY_SLOTS


def test_the_next_compact_prompt_carries_the_memory(processor: Processor):
    context = make_context(processor, COMPACT, 1000)
    context.start_episode("Work.", observation_of(0))
    assert "Memory" not in texts(processor, context.build_prompt())[1]
    answer = format_response(WORK[0], COMPACT, memory=memory_text([WORK[0].kind]))
    context.add_step(response_of(processor, answer), WORK[0], None, observation_of(1))
    system, user, *_ = texts(processor, context.build_prompt())
    assert "\nMemory: your last notes" in system
    assert user.startswith("Task: Work.\nEarlier steps:\nStep 1: left_click [20, 500] -> page ")
    assert "\nMemory of step 1: left_click;" in user


def test_an_answer_can_hold_more_slots_than_a_script_fills(processor: Processor):
    """The limit of configs/normalisers.yaml, with the vocabulary of tools/make_tiny_model."""
    from megatron_webrl.config.load import parse_config

    limit = parse_config("configs/normalisers.yaml").rollout.max_new_tokens

    def tokens(useful: int, generic: int) -> int:
        memory = " ".join(["left_click;"] * useful + [f"{GENERIC_SLOT};"] * generic)
        return len(processor.encode_response(format_response(SUBMIT, COMPACT, memory=memory)))

    assert tokens(MEMORY_SLOTS, 0) < tokens(MEMORY_SLOTS, 4) <= limit < tokens(16, 8)
