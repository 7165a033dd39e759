"""Memory and Progress in later prompts, actions in the summary, and thoughts."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence

import pytest

from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.contexts import (
    MAX_ACTION_SENTENCE_CHARS,
    ContextOverflow,
    Prompt,
    PromptContext,
    make_context,
)
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.toolset import format_tool_call, parse_tool_call
from megatron_webrl.types import Action
from tests.rollout.conversations import HOSTILE, expanded, observation_of, response_of, texts

CLICK = Action("left_click", coordinate=(500, 320))
CALL = format_tool_call(CLICK)
CARRIED = [("progress", "progress")] + [
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
    """The text of each prompt after the system message."""
    return ["\n".join(texts(processor, prompt)[1:]) for prompt in prompts]


def response(**fields: str) -> str:
    return "\n".join([*(f"{name.title()}: {text}" for name, text in fields.items()), CALL])


GO_ON = response(action="Go on.")


def _first_round(policy: str, rounds: int, step: int) -> int:
    """The first of the rounds that the prompt of a step contains."""
    return max(1, step - rounds + 1) if policy == "sliding" else step - (step - 1) % rounds


@pytest.mark.parametrize(("policy", "rounds"), WINDOWS)
def test_a_fact_of_step_1_is_once_in_every_later_prompt(processor: Processor, policy: str, rounds: int) -> None:
    for form, field in CARRIED if rounds == 2 else CARRIED[-1:]:
        first = response(**{field: '{"code": "K-77"}', "action": "Read the code."})
        empty = [response(**{field: text, "action": "Go on."}) for text in ("{}", "null", "{ }", "[]", '""')]
        later = [GO_ON, "gibberish", *empty, GO_ON]
        _, prompts = play(processor, [first, *later], response_format=form, policy=policy, history_turns=rounds)
        assert [text.count("K-77") for text in read(processor, prompts)] == [0] + [1] * 9
        shown = f'{field.title()} of step 1: {{"code": "K-77"}}\n'
        outside = [_first_round(policy, rounds, step) > 1 for step in range(1, 11)]
        assert [shown in text for text in read(processor, prompts)] == outside


@pytest.mark.parametrize(("policy", "rounds"), WINDOWS)
def test_the_latest_memory_replaces_the_earlier_one(processor: Processor, policy: str, rounds: int) -> None:
    responses = [response(memory=f'{{"count": "{number}."}}', action="Go on.") for number in range(1, 9)]
    _, prompts = play(processor, responses, response_format="memory_compressive", policy=policy, history_turns=rounds)
    for step, text in enumerate(read(processor, prompts), 1):
        first = _first_round(policy, rounds, step)
        visible = [number for number in range(1, 9) if f'"{number}."' in text]
        carried = [step - 1] if first == step and step > 1 else []
        if policy == "append" and 1 < first < step:
            carried = [first - 1]  # the segment's first prompt has it, and the segment keeps its prompts
        assert visible == carried + list(range(first, step))


def test_forms_without_memory_carry_nothing(processor: Processor) -> None:
    first = response(memory='{"code": "K-77"}', progress="{}", action="Read the code.")
    for form in ("bare", "vanilla"):
        _, prompts = play(processor, [first, GO_ON], response_format=form, history_turns=1)
        assert "K-77" not in read(processor, prompts)[-1]


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


THINKING_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content.split('</think>')[-1].lstrip('\\n') }}{%- else -%}
{%- for item in content -%}
{%- if item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ item.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def thinking(processor: Processor) -> Processor:
    """A processor whose template opens a thought in the prompt and leaves out earlier thoughts, as Thinking models'."""
    inner = copy.copy(processor._processor)
    inner.chat_template = THINKING_TEMPLATE
    return Processor(inner)


def count(processor: Processor, prompt: Prompt, tag: str) -> int:
    return int((prompt.token_ids == processor.tokenizer.convert_tokens_to_ids(tag)).sum())


class ClickSession:
    """A session whose scripted policy always clicks."""

    async def demonstration(self, premature_submit: bool) -> Action:
        return CLICK


async def test_a_response_of_a_thinking_model_continues_the_thought_of_its_prompt(
    processor: Processor, thinking: Processor
) -> None:
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
