"""Prompts that only grow: token for token the one before, its answer and a turn; where a stretch ends; merging."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.actions import format_tool_call
from megatron_webrl.rollout.contexts.append import AppendContext
from megatron_webrl.rollout.contexts.base import ContextOverflow, Prompt
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.rollout.prompts import MAX_ELEMENT_LIST_CHARS
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset
from megatron_webrl.trainer.data.merging import MergedSequence, merge_prefixes
from megatron_webrl.types import Action, Observation
from tests.rollout.conversations import HOSTILE, expanded, numbered, said, seen, texts
from tests.trainer.grown import step

CLICK = Action("left_click", coordinate=(500, 320))
THINKING = f"<think>a secret thought</think>\nAction: click\n{format_tool_call(CLICK)}"


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


def context_of(
    processor: Processor, rounds: int = 4, limit: int = 100_000, toolset: Toolset = COORDINATE_TOOLSET, compact: bool = True
) -> AppendContext:  # fmt: skip
    made = ContextConfig(policy="append", rounds=rounds, compact=compact, scroll_position=toolset.marks)
    return AppendContext(processor, made, limit, toolset)


def played(
    processor: Processor, context: AppendContext, answers: list[Generation], pages: list[Observation] | None = None
) -> list[Prompt]:
    """The prompts of an episode with these answers, all of them clicks, and one prompt more."""
    context.start_episode("Click it.", seen(0))
    asked = []
    for number, answer in enumerate(answers):
        asked.append(context.build_prompt())
        context.add_step(answer, CLICK, None, pages[number] if pages else seen(number + 1, f"Page {number + 1}"))
    return [*asked, context.build_prompt()]


def goes_on(before: Prompt, answer: Generation, after: Prompt) -> bool:
    """Whether a prompt begins with all tokens of the one before and of its answer."""
    start = np.concatenate([before.token_ids, answer.response_token_ids])
    return np.array_equal(after.token_ids[: len(start)], start)


def chains(
    processor: Processor, context: AppendContext, asked: list[Prompt], answers: list[Generation]
) -> list[MergedSequence]:
    """The trainer's sequences of these steps."""
    samples = []
    for prompt, answer in zip(asked, answers, strict=False):
        shown = tuple(context.screenshots[i] for i in prompt.image_indices)
        samples.append(
            step(
                expanded(processor, context, prompt), answer.response_token_ids, images=shown,
                grids=processor.grids(shown),
            )
        )  # fmt: skip
    video = int(processor.tokenizer.convert_tokens_to_ids("<|video_pad|>"))
    return merge_prefixes(samples, (processor.image_token_id, video))


def test_a_prompt_is_the_one_before_its_answer_and_a_turn_as_the_template_has_them(processor: Processor) -> None:
    context, answers = context_of(processor, compact=False), [said(processor, THINKING)] * 3
    asked = played(processor, context, answers)
    assert all(goes_on(*step) for step in zip(asked, answers, asked[1:], strict=False))
    turn = {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "image"}]}
    opening, *later = texts(processor, asked[-1])[1:]
    assert opening == "Task: Click it.\nStart page: [Page] http://a.localhost/b\n<IMAGE>"
    assert later == [
        part
        for number in (1, 2, 3)
        for part in (THINKING, f"Result: page changed\nPage: [Page {number}] http://a.localhost/b\n<IMAGE>")
    ]
    assert [prompt.image_indices.tolist() for prompt in asked] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    # The same conversation rendered as a whole has the same tokens.
    messages = [{"role": "system", "content": texts(processor, asked[-1])[0]}]
    for index, text in enumerate([opening, *later]):
        words = [{"type": "text", "text": text.removesuffix("<IMAGE>")}, {"type": "image"}]
        messages.append(turn | {"content": words} if index % 2 == 0 else {"role": "assistant", "content": text})
    assert processor.encode_chat(messages).tolist() == asked[-1].token_ids.tolist()


def test_answers_stand_as_they_were_produced_even_if_their_text_has_other_tokens(processor: Processor) -> None:
    letters = [int(processor.tokenizer.encode(letter, add_special_tokens=False)[0]) for letter in "Action"]
    odd = said(processor, "Action", np.array([*letters, processor.eos_token_id], np.int32))
    assert odd.response_token_ids.tolist() != processor.encode_response("Action").tolist()
    asked = played(processor, context_of(processor), [odd])
    assert goes_on(asked[0], odd, asked[1])


def test_asking_twice_gives_the_same_prompt(processor: Processor) -> None:
    context = context_of(processor)
    played(processor, context, [said(processor, THINKING)])
    assert context.build_prompt() is context.build_prompt()


@pytest.mark.parametrize("rounds", [2, 3, 8])
def test_a_full_window_becomes_lines_of_the_summary_and_thinking_is_gone(processor: Processor, rounds: int) -> None:
    context, answers = context_of(processor, rounds), [said(processor, THINKING)] * 7
    asked = played(processor, context, answers)
    assert [len(prompt.image_indices) for prompt in asked] == [number % rounds + 1 for number in range(8)]
    for number, prompt in enumerate(asked):
        begun = number - number % rounds
        shown = texts(processor, prompt)
        lines = [f"Step {n}: left_click [500, 320] -> page changed" for n in range(1, begun + 1)]
        assert shown[1].splitlines()[1:-1] == (["Earlier steps:", *lines] if lines else [])
        assert "".join(shown).count("a secret thought") == number - begun
        assert prompt.image_indices.tolist() == list(range(begun, number + 1))


@pytest.mark.parametrize(("steps", "rounds"), [(1, 4), (4, 4), (5, 4), (9, 2), (7, 8)])
def test_each_stretch_is_one_sequence_of_the_trainer(processor: Processor, steps: int, rounds: int) -> None:
    context, answers = context_of(processor, rounds), [said(processor, THINKING)] * steps
    asked = played(processor, context, answers)[:-1]
    found = chains(processor, context, asked, answers)
    assert len(found) == -(-steps // rounds)
    assert sorted(len(chain.samples) for chain in found) == sorted(
        len(list(stretch)) for _, stretch in itertools.groupby(range(steps), lambda n: n // rounds)
    )


def test_a_token_limit_ends_a_stretch_and_no_prompt_exceeds_it(processor: Processor) -> None:
    roomy, answers = context_of(processor, 8), [said(processor, THINKING)] * 7
    lengths = [len(expanded(processor, roomy, prompt)) for prompt in played(processor, roomy, answers)]
    context = context_of(processor, 8, limit=lengths[2])
    asked = played(processor, context, answers)
    assert [len(prompt.image_indices) for prompt in asked][:4] == [1, 2, 3, 1]
    assert all(len(expanded(processor, context, prompt)) <= lengths[2] for prompt in asked)
    with pytest.raises(ContextOverflow, match=r"rollout\.max_model_len - rollout\.max_new_tokens"):
        played(processor, context_of(processor, 8, limit=20), answers)


@pytest.mark.parametrize("name", ["<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|endoftext|>"])
@pytest.mark.parametrize("place", [0, -1, None])
def test_nothing_goes_on_from_an_answer_with_special_tokens(processor: Processor, name: str, place: int | None) -> None:
    """At the beginning, before the end token, or in its place."""
    answer, token = processor.encode_response("I see it."), processor.tokenizer.convert_tokens_to_ids(name)
    tokens = np.append(answer[:-1], token) if place is None else np.insert(answer, place, token)
    odd = said(processor, "I see it.", tokens.astype(np.int32))
    context, answers = context_of(processor), [said(processor, THINKING), odd, said(processor, THINKING)]
    asked = played(processor, context, answers)
    assert [len(prompt.image_indices) for prompt in asked] == [1, 2, 1, 2]
    assert "Earlier steps:\nStep 1: left_click" in texts(processor, asked[2])[1]
    assert sorted(len(chain.samples) for chain in chains(processor, context, asked, answers)) == [1, 2]


def test_an_answer_that_was_cut_off_gets_its_turns_end_and_the_prompt_goes_on_from_it(processor: Processor) -> None:
    cut = said(processor, "Action: cl", processor.encode_response("Action: cl")[:-1])
    context, answers = context_of(processor), [cut, said(processor, THINKING)]
    asked = played(processor, context, answers)
    assert goes_on(asked[0], cut, asked[1])
    assert texts(processor, asked[1])[2] == "Action: cl"
    (chain,) = chains(processor, context, asked, answers)
    ends = np.flatnonzero(chain.tokens == processor.eos_token_id)
    assert (
        np.setdiff1d(ends, chain.response_positions).size == len(ends) - 1
    )  # of the answers' ends only the second was produced


def test_a_format_error_is_told_with_the_screenshot_again(processor: Processor) -> None:
    context = context_of(processor)
    context.start_episode("Click it.", seen(0))
    first = context.build_prompt()
    gibberish = said(processor, "gibberish")
    context.add_step(gibberish, None, "no_tool_call", seen(0))
    second = context.build_prompt()
    assert goes_on(first, gibberish, second)
    assert second.image_indices.tolist() == [0, 0]
    assert texts(processor, second)[2:] == ["gibberish", "format error: no_tool_call\n<IMAGE>"]
    assert len(context.screenshots) == 1


def test_element_lists_stay_in_past_turns_until_they_are_too_long_together(processor: Processor) -> None:
    answers = [said(processor, THINKING)] * 5
    pages = [numbered(number, "n" * 150, elements=12) for number in range(1, 6)]
    context = context_of(processor, 8, toolset=Toolset(marks=True))
    asked = played(processor, context, answers, pages)
    told = ["".join(texts(processor, prompt)[1:]).split("\n") for prompt in asked]
    lists = [sum(len(line) for line in lines if line.startswith("[")) for lines in told]
    assert [len(prompt.image_indices) for prompt in asked] == [1, 2, 3, 1, 2, 1]  # some 5,000 characters a page
    assert 0 == lists[0] < lists[1] < lists[2] <= MAX_ELEMENT_LIST_CHARS
    assert all("[12] combobox" in texts(processor, prompt)[-1] for prompt in asked[1:])


def test_hostile_pages_make_no_special_token(processor: Processor) -> None:
    added = set(processor.tokenizer.get_added_vocab().values())
    found = []
    for text in (HOSTILE, "words"):
        context = context_of(processor, toolset=Toolset(marks=True), compact=False)
        page = replace(numbered(1, text, text), error=text, url=f"http://a/{text}")
        asked = played(processor, context, [said(processor, format_tool_call(CLICK))] * 2, [page, page])
        found.append([int(token) for token in asked[-1].token_ids if int(token) in added])
    assert found[0] == found[1]
    assert found[0].count(processor.image_token_id) == 3


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.text(max_size=60), st.text(max_size=30), st.booleans(), st.booleans()), max_size=8),
    limit=st.integers(1, 900),
    rounds=st.integers(2, 4),
)
def test_every_prompt_fits_and_goes_on_or_begins_a_stretch_and_stretches_are_sequences(
    processor: Processor, steps: list[tuple[str, str, bool, bool]], limit: int, rounds: int
) -> None:
    context = context_of(processor, rounds, limit)
    context.start_episode("task", seen())
    asked: list[Prompt] = []
    answers: list[Generation] = []
    stretches = 0
    for shade, (text, title, valid, cut) in enumerate(steps):
        try:
            asked.append(context.build_prompt())
        except ContextOverflow:
            break
        tokens = processor.encode_response(text)
        answers.append(said(processor, text, tokens[:-1] if cut and len(tokens) > 1 else tokens))
        action = Action("answer", text=text) if valid else None
        context.add_step(answers[-1], action, None if valid else "bad_json", seen(shade, title))
        prompt = asked[-1]
        assert (prompt.token_ids == processor.image_token_id).sum() == len(prompt.image_indices) <= rounds
        assert len(expanded(processor, context, prompt)) <= limit
        if len(asked) == 1 or not goes_on(asked[-2], answers[-2], prompt):
            stretches += 1
            assert len(prompt.image_indices) == 1
    assert len(chains(processor, context, asked, answers)) == stretches
