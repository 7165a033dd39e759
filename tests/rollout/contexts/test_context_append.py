"""Prompts of the append policy, Memory and Progress in later prompts, actions in the summary, and thoughts."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import (
    MAX_ACTION_SENTENCE_CHARS,
    MAX_ELEMENT_LIST_CHARS,
    AppendContext,
    ContextOverflow,
    Prompt,
    PromptContext,
    make_context,
)
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset, format_tool_call, parse_tool_call
from megatron_webrl.trainer.data.prefix_merging import MergedSequence, merge_prefixes
from megatron_webrl.types import Action, Observation
from tests.rollout.conversations import HOSTILE, expanded, numbered, observation_of, response_of, texts
from tests.trainer.growing_prompts import step
from tools.tiny_tokenizer import CHAT_TEMPLATE

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


CALL = format_tool_call(CLICK)
CARRIED = [("memory_compact", "memory"), ("progress", "progress")] + [
    (f"memory_{kind}", field) for kind in ("additive", "compressive") for field in ("memory", "progress")
]
WINDOWS = [("sliding", 1), ("sliding", 2), ("sliding", 5), ("append", 2), ("append", 5)]


def play(
    processor: Processor, responses: Sequence[str], limit: int = 100_000, every: bool = True, **settings: object
) -> tuple[PromptContext, list[Prompt]]:
    """The prompts of an episode with these responses, and one more; not `every`: only the last one."""
    context = make_context(processor, ContextConfig(**settings), limit)  # type: ignore[arg-type]
    context.start_episode("Buy it.", observation_of(0))
    prompts = []
    for number, response in enumerate(responses, 1):
        prompts += [context.build_prompt()] if every else []
        action, error = (CLICK, None) if response.endswith(CALL) else (None, "no_tool_call")
        context.add_step(response_of(processor, response), action, error, observation_of(number, f"Page {number}"))
    return context, [*prompts, context.build_prompt()]


def read(processor: Processor, prompts: Sequence[Prompt]) -> list[str]:
    return ["\n".join(texts(processor, prompt)[1:]) for prompt in prompts]


def response(**fields: str) -> str:
    return "\n".join([*(f"{name.title()}: {text}" for name, text in fields.items()), CALL])


GO_ON = response(action="Go on.")


def _first_round(policy: str, rounds: int, step: int) -> int:
    return max(1, step - rounds + 1) if policy == "sliding" else step - (step - 1) % rounds


@pytest.mark.parametrize(("policy", "rounds"), WINDOWS)
def test_a_fact_of_step_1_is_once_in_every_later_prompt(processor: Processor, policy: str, rounds: int) -> None:
    for form, field in CARRIED if rounds == 2 else CARRIED[-1:]:
        first = response(**{field: '{"code": "K-77"}', "action": "Read the code."})
        empty = [response(**{field: text, "action": "Go on."}) for text in ("{}", "null", "{ }", "[]", '""')]
        later = [GO_ON, "gibberish", *empty, GO_ON]
        chosen = {
            "response_format": form,
            "policy": policy,
            "history_turns": rounds,
            "compact": form == "memory_compact",
        }
        _, prompts = play(processor, [first, *later], **chosen)
        assert [text.count("K-77") for text in read(processor, prompts)] == [0] + [1] * 9
        shown = f'{field.title()} of step 1: {{"code": "K-77"}}\n'
        outside = [_first_round(policy, rounds, step) > 1 for step in range(1, 11)]
        assert [shown in text for text in read(processor, prompts)] == outside


@pytest.mark.parametrize(("policy", "rounds"), WINDOWS)
def test_the_latest_memory_replaces_the_earlier_one(processor: Processor, policy: str, rounds: int) -> None:
    responses = [response(memory=f'{{"count": "{number}."}}', action="Go on.") for number in range(1, 9)]
    _, prompts = play(processor, responses, response_format="memory_compressive", policy=policy, history_turns=rounds)
    for shown, text in enumerate(read(processor, prompts), 1):
        first = _first_round(policy, rounds, shown)
        visible = [number for number in range(1, 9) if f'"{number}."' in text]
        carried = [shown - 1] if first == shown and shown > 1 else []
        if policy == "append" and 1 < first < shown:
            carried = [first - 1]  # the segment's first prompt has it, and the segment keeps its prompts
        assert visible == carried + list(range(first, shown))


def test_a_memory_of_thoughts_or_of_a_response_cut_off_does_not_replace_the_latest(processor: Processor) -> None:
    responses = [
        response(memory='{"code": "K-77"}', action="Read."),
        f'<think>Memory: {{"code": "thought"}}\nAction: x</think>{GO_ON}',
        f'Memory: {{"code": "thought"}}\nAction: x</think>{GO_ON}',
        'Memory: {"code": "cut',
        response(memory=""),
    ]
    _, prompts = play(processor, responses, response_format="memory_additive", history_turns=1)
    for text in read(processor, prompts)[1:]:
        assert 'Memory of step 1: {"code": "K-77"}\n' in text
        assert "thought" not in text
        assert "cut" not in text


def test_a_long_memory_is_complete_if_there_is_room_else_its_middle_is_left_out(processor: Processor) -> None:
    memory = json.dumps({f"fact {number}": "x" * 20 for number in range(300)})
    for policy in ("sliding", "append"):
        settings = {"response_format": "memory_additive", "policy": policy, "history_turns": 2}
        _, prompts = play(processor, [response(memory=memory, progress=memory), *[GO_ON] * 3], **settings)
        assert [text.count(memory) for text in read(processor, prompts)] == [0] + [2] * 4
    responses, settings = [response(memory=memory)], {"response_format": "memory_additive", "history_turns": 1}
    context, prompts = play(processor, responses, **settings)
    limit = len(expanded(processor, context, prompts[-1])) - 1000
    context, prompts = play(processor, responses, limit, **settings)
    (line,) = [line for line in read(processor, prompts)[-1].splitlines() if line.startswith("Memory of")]
    found = re.fullmatch(r"Memory of step 1: (.+) \.\.\. \((\d+) characters left out\) \.\.\. (.+)", line)
    assert found
    head, missing, tail = found.groups()
    assert memory.startswith(head)
    assert memory.endswith(tail)
    assert len(head) + int(missing) + len(tail) == len(memory)
    assert limit - 40 <= len(expanded(processor, context, prompts[-1])) <= limit


def test_memory_outlives_rounds_and_summary_when_the_prompt_is_too_long_and_never_masks(processor: Processor) -> None:
    memory = f'{{"a": "{" and more" * 15}", "code": "K-77", "b": "{" and more" * 15}"}}'
    responses = [response(memory=memory, action="Read."), *[response(action="Go on, " * 8)] * 6]
    settings = {"response_format": "memory_additive", "history_turns": 4}
    context, prompts = play(processor, responses, every=False, **settings)
    length, seen = len(expanded(processor, context, prompts[-1])), []
    for limit in range(length, 0, -50):
        try:
            context, prompts = play(processor, responses, limit, False, **settings)
        except ContextOverflow:
            break
        assert len(expanded(processor, context, prompts[-1])) <= limit
        seen.append(("K-77" in read(processor, prompts)[-1], "(7 more)" in read(processor, prompts)[-1]))
    assert seen[0] == (True, False)
    assert (True, True) in seen
    assert seen[-1] == (False, True)  # the shortest prompts leave it out instead of masking the episode
    assert seen == sorted(seen, key=lambda found: (-found[0], found[1]))


def test_the_summary_quotes_the_action_field_or_describes_the_action(processor: Processor) -> None:
    long = f"Press {HOSTILE.splitlines()[0]} {'x' * 300}\nand wait"
    responses = [
        response(action="Open  the basket."), CALL, f"Action: Close it.\n{CALL} <tool_call>", "gibberish",
        response(action=long), response(thought="It is time."),
    ]  # fmt: skip
    _, prompts = play(processor, responses, response_format="vanilla", history_turns=1)
    lines = read(processor, prompts)[-1].splitlines()[3:-1]
    assert [*lines[:4], lines[5]] == [
        "Step 1 on [Page]: Open the basket. -> page changed",
        "Step 2 on [Page 1]: left_click [500, 320] -> page changed",
        "Step 3 on [Page 2]: Close it. -> format error: no_tool_call",
        "Step 4 on [Page 3]: no valid tool call -> format error: no_tool_call",
        "Step 6 on [Page 5]: left_click [500, 320] -> page changed",
    ]
    assert lines[4].startswith("Step 5 on [Page 4]: Press <\u200b|image_pad|>")
    assert lines[4].endswith("xxx... -> page changed")
    assert len(lines[4]) < MAX_ACTION_SENTENCE_CHARS + 60


THINKING_TEMPLATE = CHAT_TEMPLATE.replace("{{ content }}", "{{ content.split('</think>')[-1].lstrip('\\n') }}").replace(
    "assistant\\n' -}}", "assistant\\n<think>\\n' -}}"
)


@pytest.fixture(scope="module")
def thinking(processor: Processor) -> Processor:
    """A processor whose template opens a thought in the prompt and leaves out earlier thoughts, as Thinking models'."""
    inner = copy.copy(processor._processor)
    inner.chat_template = THINKING_TEMPLATE
    return Processor(inner)


def count(processor: Processor, prompt: Prompt, tag: str) -> int:
    return int((prompt.token_ids == processor.tokenizer.convert_tokens_to_ids(tag)).sum())


class ClickSession:
    async def demonstration(self, premature_submit: bool) -> Action:
        return CLICK


async def test_a_response_continues_the_thought_of_its_prompt(processor: Processor, thinking: Processor) -> None:
    assert (processor.thought_prefix, thinking.thought_prefix) == ("", "<think>\n")
    assert response_of(thinking, "a thought</think>b").text == "<think>\na thought</think>b"
    context, prompts = play(thinking, [])
    script = ScriptedGenerator(thinking, RolloutConfig(max_new_tokens=256))
    answer = await script.generate(ClickSession(), prompts[-1].token_ids, context.screenshots)  # type: ignore[arg-type]
    assert thinking.decode(answer.response_token_ids).startswith("</think>\n\nAction: left_click")
    assert parse_tool_call(answer.text).action == CLICK


def test_thoughts_of_thinking_models_leave_sliding_prompts_unless_asked_for(thinking: Processor) -> None:
    """The second was cut off within the thought, which has neither tag in the response itself."""
    for answer in ("a secret</think>\n\n{}", "a secret {}"):
        context, _ = play(thinking, [])
        context.add_step(response_of(thinking, answer.format(CALL)), CLICK, None, observation_of(1))
        prompt = context.build_prompt()
        text = thinking.tokenizer.decode(prompt.token_ids.tolist())
        assert "secret" not in text
        assert (CALL in text.partition("Buy it.")[2]) == ("</think>" in answer)
        assert [count(thinking, prompt, tag) for tag in ("<think>", "</think>")] == [1, 0]  # of the response to come
    context, _ = play(thinking, [], keep_thinking=True, history_turns=3)
    for thought in (f"first {HOSTILE}</think>\n\n{CALL}", "cut off"):
        action = CLICK if thought.endswith(CALL) else None
        context.add_step(response_of(thinking, thought), action, None if action else "x", observation_of(1))
    prompt = context.build_prompt()
    text = thinking.tokenizer.decode(prompt.token_ids.tolist(), clean_up_tokenization_spaces=False)
    assert (
        f"<|im_start|>assistant\n<think>\nfirst {thinking.escape_special_tokens(HOSTILE)}\n</think>\n\n{CALL}" in text
    )
    assert "<|im_start|>assistant\n<think>\ncut off\n</think>\n\n<|im_end|>" in text
    assert [count(thinking, prompt, tag) for tag in ("<think>", "</think>")] == [3, 2]


def test_a_call_that_quotes_tags_stays_a_call_in_sliding_prompts(processor: Processor) -> None:
    action = Action("type", text="</tool_call> <think> </think>")
    context, prompts = play(processor, [])
    answer = f"<think>{CALL} </think>more {CALL}</think>\n{format_tool_call(action)}"
    context.add_step(response_of(processor, answer), action, None, observation_of(1))
    prompt = context.build_prompt()
    escaped = Action("type", text="<\u200b/tool_call> <\u200bthink> <\u200b/think>")
    assert texts(processor, prompt)[2] == format_tool_call(escaped)
    assert count(processor, prompt, "</tool_call>") == count(processor, prompts[-1], "</tool_call>") + 1
