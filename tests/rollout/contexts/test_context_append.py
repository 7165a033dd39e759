"""Prompts of the append policy: token-exact extension, ends of segments, merging in the trainer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import (
    MAX_ELEMENT_LIST_CHARS,
    AppendContext,
    ContextOverflow,
    Prompt,
    PromptContext,
    make_context,
)
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset, format_tool_call
from megatron_webrl.trainer.data.prefix_merging import MergedSequence, merge_prefixes
from megatron_webrl.types import Action, Observation
from tests.rollout.conversations import expanded, numbered, observation_of, response_of, texts
from tests.trainer.growing_prompts import step

CLICK = Action("left_click", coordinate=(500, 320))
THINKING = f"<think>a secret thought</think>\nAction: click\n{format_tool_call(CLICK)}"


def context_of(
    processor: Processor, rounds: int = 4, limit: int = 100_000, toolset: Toolset = COORDINATE_TOOLSET,
    compact: bool = True,
) -> AppendContext:  # fmt: skip
    made = ContextConfig(policy="append", history_turns=rounds, compact=compact, scroll_position=toolset.marks)
    return AppendContext(processor, made, limit, toolset)


def prompts_of(
    context: AppendContext, answers: list[Generation], pages: list[Observation] | None = None
) -> list[Prompt]:
    """The prompts of an episode with these responses, all of them clicks, and one more prompt."""
    context.start_episode("Click it.", observation_of(0))
    prompts = []
    for number, answer in enumerate(answers):
        prompts.append(context.build_prompt())
        page = pages[number] if pages else observation_of(number + 1, f"Page {number + 1}")
        context.add_step(answer, CLICK, None, page)
    return [*prompts, context.build_prompt()]


def extends(before: Prompt, answer: Generation, after: Prompt) -> bool:
    """Whether a prompt begins with all tokens of the previous prompt and its response."""
    start = np.concatenate([before.token_ids, answer.response_token_ids])
    return np.array_equal(after.token_ids[: len(start)], start)


def sequences_of(
    processor: Processor, context: PromptContext, prompts: list[Prompt], answers: list[Generation]
) -> list[MergedSequence]:
    """The training sequences of these steps."""
    samples = []
    for prompt, answer in zip(prompts, answers, strict=False):
        shown = tuple(context.screenshots[i] for i in prompt.image_indices)
        tokens, grids = expanded(processor, context, prompt), processor.grids(shown)
        samples.append(step(tokens, answer.response_token_ids, images=shown, grids=grids))
    video = int(processor.tokenizer.convert_tokens_to_ids("<|video_pad|>"))
    return merge_prefixes(samples, (processor.image_token_id, video))


def test_a_prompt_is_the_previous_one_its_response_and_a_turn_of_the_template(processor: Processor) -> None:
    context, answers = context_of(processor, compact=False), [response_of(processor, THINKING)] * 3
    prompts = prompts_of(context, answers)
    assert context.build_prompt() is prompts[-1]
    assert all(extends(*step) for step in zip(prompts, answers, prompts[1:], strict=False))
    opening, *later = texts(processor, prompts[-1])[1:]
    assert opening == "Task: Click it.\nStart page: [Page] http://a.localhost/b\n<IMAGE>"
    assert later == [
        part
        for number in (1, 2, 3)
        for part in (THINKING, f"Result: page changed\nPage: [Page {number}] http://a.localhost/b\n<IMAGE>")
    ]
    assert [prompt.image_indices.tolist() for prompt in prompts] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    # The same conversation rendered as a whole has the same tokens.
    messages = [{"role": "system", "content": texts(processor, prompts[-1])[0]}]
    for index, text in enumerate([opening, *later]):
        content = [{"type": "text", "text": text.removesuffix("<IMAGE>")}, {"type": "image"}]
        messages.append({"role": "assistant", "content": text} if index % 2 else {"role": "user", "content": content})
    assert processor.encode_chat(messages).tolist() == prompts[-1].token_ids.tolist()


def test_a_full_window_becomes_lines_of_the_summary_without_thinking(processor: Processor) -> None:
    answers = [response_of(processor, THINKING)] * 7
    for rounds in (2, 3, 8):
        prompts = prompts_of(context_of(processor, rounds), answers)
        for number, prompt in enumerate(prompts):
            begun = number - number % rounds
            shown = texts(processor, prompt)
            lines = [f"Step {n}: left_click [500, 320] -> page changed" for n in range(1, begun + 1)]
            assert shown[1].splitlines()[1:-1] == (["Earlier steps:", *lines] if lines else [])
            assert "".join(shown).count("a secret thought") == number - begun
            assert prompt.image_indices.tolist() == list(range(begun, number + 1))


def test_the_token_limit_ends_a_segment_and_no_prompt_exceeds_it(processor: Processor) -> None:
    roomy, answers = context_of(processor, 8), [response_of(processor, THINKING)] * 7
    lengths = [len(expanded(processor, roomy, prompt)) for prompt in prompts_of(roomy, answers)]
    context = context_of(processor, 8, limit=lengths[2])
    prompts = prompts_of(context, answers)
    assert [len(prompt.image_indices) for prompt in prompts][:4] == [1, 2, 3, 1]
    assert all(len(expanded(processor, context, prompt)) <= lengths[2] for prompt in prompts)
    with pytest.raises(ContextOverflow, match=r"rollout\.max_model_len - rollout\.max_new_tokens"):
        prompts_of(context_of(processor, 8, limit=20), answers)


def test_no_prompt_extends_a_response_with_special_tokens(processor: Processor) -> None:
    """At the beginning, before the end token, or in its place."""
    plain, answer = response_of(processor, THINKING), processor.encode_response("I see it.")
    for name, place in (
        ("<|image_pad|>", 0), ("<|video_pad|>", -1), ("<|im_start|>", None), ("<|endoftext|>", None)
    ):  # fmt: skip
        token = processor.tokenizer.convert_tokens_to_ids(name)
        tokens = np.append(answer[:-1], token) if place is None else np.insert(answer, place, token)
        answers = [plain, response_of(processor, "I see it.", tokens.astype(np.int32)), plain]
        context = context_of(processor)
        prompts = prompts_of(context, answers)
        assert [len(prompt.image_indices) for prompt in prompts] == [1, 2, 1, 2], name
        assert "Earlier steps:\nStep 1: left_click" in texts(processor, prompts[2])[1]
        sequences = sequences_of(processor, context, prompts, answers)
        assert sorted(len(sequence.samples) for sequence in sequences) == [1, 2]


def test_a_truncated_response_gets_its_end_of_turn_and_the_prompt_extends_it(processor: Processor) -> None:
    cut = response_of(processor, "Action: cl", processor.encode_response("Action: cl")[:-1])
    context, answers = context_of(processor), [cut, response_of(processor, THINKING)]
    prompts = prompts_of(context, answers)
    assert extends(prompts[0], cut, prompts[1])
    assert texts(processor, prompts[1])[2] == "Action: cl"
    (sequence,) = sequences_of(processor, context, prompts, answers)
    ends = np.flatnonzero(sequence.tokens == processor.eos_token_id)
    produced = np.intersect1d(ends, sequence.response_positions)
    assert produced.size == 1  # of the answers' ends only the second


def test_a_format_error_repeats_the_screenshot(processor: Processor) -> None:
    context, gibberish = context_of(processor), response_of(processor, "gibberish")
    context.start_episode("Click it.", observation_of(0))
    first = context.build_prompt()
    context.add_step(gibberish, None, "no_tool_call", observation_of(0))
    second = context.build_prompt()
    assert extends(first, gibberish, second)
    assert second.image_indices.tolist() == [0, 0]
    assert texts(processor, second)[2:] == ["gibberish", "format error: no_tool_call\n<IMAGE>"]
    assert len(context.screenshots) == 1


def test_element_lists_stay_in_past_turns_up_to_their_total_limit(processor: Processor) -> None:
    answers = [response_of(processor, THINKING)] * 5
    pages = [numbered(number, "n" * 150, elements=12) for number in range(1, 6)]
    prompts = prompts_of(context_of(processor, 8, toolset=Toolset(marks=True)), answers, pages)
    lines_of = ["".join(texts(processor, prompt)[1:]).split("\n") for prompt in prompts]
    lists = [sum(len(line) for line in lines if line.startswith("[")) for lines in lines_of]
    assert [len(prompt.image_indices) for prompt in prompts] == [1, 2, 3, 1, 2, 1]  # some 5,000 characters a page
    assert 0 == lists[0] < lists[1] < lists[2] <= MAX_ELEMENT_LIST_CHARS
    assert all("[12] combobox" in texts(processor, prompt)[-1] for prompt in prompts[1:])


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.text(max_size=60), st.text(max_size=30), st.booleans(), st.booleans()), max_size=8),
    limit=st.integers(1, 900),
    window=st.sampled_from([("sliding", 1), ("sliding", 3), ("append", 2), ("append", 4)]),
)
def test_every_prompt_fits_and_extends_or_begins_a_segment_and_segments_are_sequences(
    processor: Processor, steps: list[tuple[str, str, bool, bool]], limit: int, window: tuple[str, int]
) -> None:
    policy, rounds = window
    context = make_context(processor, ContextConfig(policy=policy, history_turns=rounds, compact=True), limit)
    context.start_episode("task", observation_of())
    prompts: list[Prompt] = []
    answers: list[Generation] = []
    segments = 0
    for shade, (text, title, valid, cut) in enumerate(steps):
        try:
            prompts.append(context.build_prompt())
        except ContextOverflow:
            break
        tokens = processor.encode_response(text)
        answers.append(response_of(processor, text, tokens[:-1] if cut and len(tokens) > 1 else tokens))
        action, before = Action("answer", text=text) if valid else None, list(context.screenshots)
        context.add_step(answers[-1], action, None if valid else "bad_json", observation_of(shade, title))
        prompt = prompts[-1]
        assert (prompt.token_ids == processor.image_token_id).sum() == len(prompt.image_indices) <= rounds
        assert len(expanded(processor, context, prompt)) <= limit
        assert prompt.image_indices[-1] == len(before) - 1
        if len(prompts) == 1 or not extends(prompts[-2], answers[-2], prompt):
            segments += 1
            assert policy == "sliding" or len(prompt.image_indices) == 1
    assert len(sequences_of(processor, context, prompts, answers)) == segments
