"""Prompts of the sliding policy: contents, limits, hostile text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout import contexts
from megatron_webrl.rollout.contexts import ContextOverflow, SlidingContext
from megatron_webrl.rollout.toolset import Toolset, format_tool_call
from megatron_webrl.types import Action, Element, Observation
from tests.rollout.conversations import (
    HOSTILE,
    expanded,
    numbered,
    observation_of,
    response_of,
    screenshot,
    texts,
    turns,
)

CLICK = Action("left_click", coordinate=(500, 320))


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


def conversation(
    processor: Processor, steps: int, limit: int = 100_000, rounds: int = 3, compact: bool = False,
    response_format: str = "bare",
) -> SlidingContext:  # fmt: skip
    settings = ContextConfig(history_turns=rounds, compact=compact, response_format=response_format)
    context = SlidingContext(processor, settings, limit)
    context.start_episode("Click it.", observation_of(title="Page 0"))
    for step in range(1, steps + 1):
        answer = f"<think>secret thought</think>Action: number {step}\n{format_tool_call(CLICK)}"
        context.add_step(response_of(processor, answer), CLICK, None, observation_of(step, f"Page {step}"))
    return context


def test_the_first_prompt_has_tool_task_start_page_and_the_screenshot_last(processor: Processor) -> None:
    prompt = conversation(processor, 0, response_format="vanilla").build_prompt()
    system, user = texts(processor, prompt)
    assert "<tools>" in system
    assert '"computer_use"' in system
    assert "\nAction: " in system
    assert user == "Task: Click it.\nStart page: [Page 0] http://a.localhost/b\n<IMAGE>"
    assert prompt.image_indices.tolist() == [0]
    assert (prompt.token_ids == processor.image_token_id).sum() == 1


@pytest.mark.parametrize(("response_format", "field"), [("bare", "nothing else"), ("progress", "Progress:")])
def test_the_response_format_is_in_the_system_message(processor: Processor, response_format: str, field: str) -> None:
    assert field in texts(processor, conversation(processor, 0, response_format=response_format).build_prompt())[0]


def test_the_window_keeps_the_latest_steps_and_the_summary_has_the_others(processor: Processor) -> None:
    prompt = conversation(processor, 5, rounds=3).build_prompt()
    assert [role for role, _ in turns(processor, prompt)] == ["system", "user", *["assistant", "user"] * 2]
    assert prompt.image_indices.tolist() == [3, 4, 5]
    contents = texts(processor, prompt)
    assert contents[1].endswith(
        "Earlier steps:\n"
        "Step 1 on [Page 0]: left_click [500, 320] -> page changed\n"
        "Step 2 on [Page 1]: left_click [500, 320] -> page changed\n"
        "Step 3 on [Page 2]: left_click [500, 320] -> page changed\n<IMAGE>"
    )
    assert contents[2] == f"Action: number 4\n{format_tool_call(CLICK)}"
    assert contents[3] == "Result: page changed\nPage: [Page 4] http://a.localhost/b\n<IMAGE>"
    assert "secret thought" not in "".join(contents)


def test_constant_text_comes_first(processor: Processor) -> None:
    """With a full window the common prefix ends at the newest line of the summary."""
    before, after = (conversation(processor, steps, rounds=3).build_prompt() for steps in (5, 6))
    length = min(len(before.token_ids), len(after.token_ids))
    shared = int((before.token_ids[:length] != after.token_ids[:length]).argmax())
    text = processor.tokenizer.decode(after.token_ids[:shared].tolist(), clean_up_tokenization_spaces=False)
    for part in ("<tools>", "Task: Click it.", "Start page:", "Step 1 on", "Step 2 on", "Step 3 on"):
        assert part in text
    assert "<|image_pad|>" not in text


def test_rounds_of_one_gives_the_current_screenshot_with_a_summary(processor: Processor) -> None:
    prompt = conversation(processor, 2, rounds=1, compact=True).build_prompt()
    assert texts(processor, prompt) == [
        "<tools>computer_use: left_click, type, scroll, wait, go_back, navigate, answer</tools>",
        "Task: Click it.\nEarlier steps:\nStep 1: left_click [500, 320] -> page changed\n"
        "Step 2: left_click [500, 320] -> page changed\n<IMAGE>",
    ]
    assert prompt.image_indices.tolist() == [2]


def test_a_compact_prompt_is_short(processor: Processor) -> None:
    ids = conversation(processor, 0, compact=True).build_prompt().token_ids
    assert len(ids) < 80
    assert len(ids) < len(conversation(processor, 0).build_prompt().token_ids) / 4


def test_a_format_error_and_an_unchanged_page_add_no_screenshot(processor: Processor) -> None:
    context = conversation(processor, 0, rounds=1)
    context.add_step(response_of(processor, "gibberish"), None, "no_tool_call", observation_of(0))
    context.add_step(
        response_of(processor, format_tool_call(CLICK)),
        CLICK,
        None,
        observation_of(1, changed=False, error="no text field has the focus"),
    )
    prompt = context.build_prompt()
    assert len(context.screenshots) == 2
    assert prompt.image_indices.tolist() == [1]
    lines = texts(processor, prompt)[1].splitlines()
    assert lines[3] == "Step 1 on [Page 0]: no valid tool call -> format error: no_tool_call"
    assert lines[4] == "Step 2 on [Page]: left_click [500, 320] -> page unchanged, no text field has the focus"


def test_a_repeated_screenshot_is_shown_again_and_stored_once(processor: Processor) -> None:
    context = conversation(processor, 1, rounds=3)
    context.add_step(response_of(processor, "gibberish"), None, "no_tool_call", observation_of(1))
    prompt = context.build_prompt()
    assert prompt.image_indices.tolist() == [0, 1, 1]
    assert len(context.screenshots) == 2


def test_only_the_current_screenshot_has_elements_tabs_and_scroll_position(processor: Processor) -> None:
    toolset = Toolset(marks=True, extra_actions=("switch_tab",))
    context = SlidingContext(processor, ContextConfig(history_turns=2, scroll_position=True), 100_000, toolset)
    context.start_episode("Buy it.", numbered(0, "Size"))
    click = Action("click", element_id=1)
    context.add_step(response_of(processor, format_tool_call(click, toolset)), click, None, numbered(1, "Colour"))
    system, first, _, last = texts(processor, context.build_prompt())
    assert '"web_interaction"' in system
    assert first == "Task: Buy it.\nStart page: [Shop] http://a.localhost/b\n<IMAGE>"
    assert last == (
        "Result: page changed\nPage: [Shop] http://a.localhost/b\n"
        "Tabs:\n1. [Shop] http://a/Shop\n2. [Shop] http://b (shown)\n"
        "Scrolled to 250 of 5000 pixels\n"
        'Elements:\n[1] combobox "Colour", value "Colour", options "Colour", "M" (focused, required)\n<IMAGE>'
    )
    context.add_step(response_of(processor, "gibberish"), None, "no_tool_call", numbered(1, "Colour"))
    assert "Elements:\n[1]" in texts(processor, context.build_prompt())[-1]


def test_the_scroll_position_is_shown_only_if_enabled(processor: Processor) -> None:
    context = SlidingContext(processor, ContextConfig(), 100_000)
    context.start_episode("Read it.", numbered(0, "Size"))
    assert "Scrolled" not in texts(processor, context.build_prompt())[-1]


def test_hostile_names_of_elements_and_tabs_give_no_special_token(processor: Processor) -> None:
    added = set(processor.tokenizer.get_added_vocab().values())
    special_tokens = []
    for text in (HOSTILE, "words"):
        context = SlidingContext(processor, ContextConfig(scroll_position=True), 100_000, Toolset(marks=True))
        context.start_episode("Task", numbered(0, text, text))
        prompt = context.build_prompt()
        special_tokens.append([int(token) for token in prompt.token_ids if int(token) in added])
        page = texts(processor, prompt)[-1]
        assert text == "words" or not any(tag in page for tag in ("<tool_call>", "</tool_call>", "<think>", "<|"))
    assert special_tokens[0] == special_tokens[1]


@pytest.mark.parametrize("compact", [True, False])
def test_hostile_text_gives_no_special_token(processor: Processor, compact: bool) -> None:
    special = set(processor.tokenizer.get_added_vocab().values())
    special_tokens = []
    for text in (HOSTILE, "words"):
        context = SlidingContext(
            processor, ContextConfig(history_turns=2, compact=compact, response_format="bare"), 100_000
        )
        page = Observation(screenshot(), f"http://a/{text}", text, True, error=text)
        context.start_episode(text, page)
        context.add_step(response_of(processor, f"{text}"), None, "no_tool_call", page)
        context.add_step(
            response_of(processor, format_tool_call(Action("type", text=text))), Action("type", text=text), None, page
        )
        quoting = f"{text.replace('tool_call', 'tool').replace('think', 'thin')}\n{format_tool_call(CLICK)}"
        context.add_step(response_of(processor, quoting), CLICK, None, page)
        prompt = context.build_prompt()
        special_tokens.append([int(token) for token in prompt.token_ids if int(token) in special])
    assert special_tokens[0] == special_tokens[1]
    assert special_tokens[0].count(processor.image_token_id) == 2
    assert special_tokens[0].count(processor.eos_token_id) == 4  # of system, user, assistant, user


def test_a_smaller_limit_drops_steps_then_summary_lines_but_never_the_screenshot(processor: Processor) -> None:
    whole = conversation(processor, 8, rounds=4).build_prompt()
    length = len(expanded(processor, conversation(processor, 8), whole))
    windows, omitted = [], []
    for limit in range(length, 0, -10):
        context = conversation(processor, 8, limit=limit, rounds=4)
        try:
            prompt = context.build_prompt()
        except ContextOverflow:
            break
        assert len(expanded(processor, context, prompt)) <= limit
        assert prompt.image_indices[-1] == 8
        windows.append(len(prompt.image_indices))
        text = texts(processor, prompt)[1]
        omitted.append(int(text.split("(")[1].split(" more")[0]) if " more)" in text else 0)
    else:
        raise AssertionError("no limit was too small")
    with pytest.raises(
        ContextOverflow, match=rf"exceeds {limit} tokens \(rollout.max_model_len - rollout.max_new_tokens"
    ):
        conversation(processor, 8, limit=limit).build_prompt()
    assert windows == sorted(windows, reverse=True)
    assert set(windows) == {1, 2, 3, 4}
    assert omitted == sorted(omitted)
    assert omitted[-1] == 8
    assert all(count == 0 for count, window in zip(omitted, windows, strict=True) if window > 1)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(st.tuples(st.text(max_size=60), st.text(max_size=30), st.booleans()), max_size=6),
    limit=st.integers(1, 900),
    rounds=st.integers(1, 4),
)
def test_every_prompt_fits_and_has_a_placeholder_for_each_image(
    processor: Processor, steps: list[tuple[str, str, bool]], limit: int, rounds: int
) -> None:
    context = SlidingContext(processor, ContextConfig(history_turns=rounds, compact=True), limit)
    context.start_episode("task", observation_of())
    for shade, (response, title, valid) in enumerate(steps):
        action = Action("answer", text=response) if valid else None
        context.add_step(
            response_of(processor, response), action, None if valid else "bad_json", observation_of(shade, title)
        )
    try:
        prompt = context.build_prompt()
    except ContextOverflow:
        return
    assert (prompt.token_ids == processor.image_token_id).sum() == len(prompt.image_indices)
    assert len(expanded(processor, context, prompt)) <= limit
    assert prompt.image_indices[-1] == len(context.screenshots) - 1


def test_the_list_of_elements_is_cut_and_the_rest_counted() -> None:
    """The largest element list of a session must not push the task out of the prompt."""
    options = tuple(f"{number} {'o' * 78}" for number in range(20))
    elements = tuple(
        Element(number, "combobox", "n" * 80, (0, 0, 9, 9), "v" * 80, ("focused",), options) for number in range(1, 101)
    )
    lines = contexts.page_state_text(elements, (), None).splitlines()
    assert sum(map(len, lines)) < contexts.MAX_ELEMENT_LIST_CHARS + 100
    assert all(len(line) < contexts.MAX_ELEMENT_CHARS + 20 for line in lines)
    assert lines[-1] == f"({100 - (len(lines) - 2)} more are not listed)"
    short = tuple(Element(number, "link", "name", (0, 0, 9, 9)) for number in range(1, 101))
    assert len(contexts.page_state_text(short, (), None).splitlines()) == 101
