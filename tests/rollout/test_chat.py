"""Requests of OpenAI's chat completions as prompts, and responses as messages."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.chat import ChatRequest, Conversations, RequestRefused, parse_request
from megatron_webrl.rollout.demonstrations import scripted_generation
from tests.rollout.conversations import HOSTILE, screenshot

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}\
{{ '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{ message.content }}{% else %}{% for part in message.content -%}
{%- if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif -%}
{%- endfor %}{% endif -%}
{%- for call in message.tool_calls or [] -%}
{{ '\n<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""
CLICK = {"type": "function", "function": {"name": "click", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "click", "arguments": {"x": 5}}\n</tool_call>'


@pytest.fixture(scope="module")
def tools_processor(tiny_model: Path) -> Processor:
    """A processor whose template writes tools."""
    processor = Processor.load(tiny_model)
    processor._processor.chat_template = TEMPLATE
    return processor


def request(processor: Processor, messages: list[Any], **options: Any) -> ChatRequest:
    return parse_request(json.dumps({"model": "policy", "messages": messages, **options}).encode(), processor)


def user(text: str, *images: bytes) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for image in images:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": parts}


def decoded(processor: Processor, token_ids: np.ndarray) -> str:
    return str(processor.tokenizer.decode(token_ids))


def answer(
    calls: Conversations, asked: ChatRequest, text: str, finish_reason: str = "stop"
) -> tuple[dict[str, Any], str, np.ndarray]:
    """Answer a request with `text`: the message, why it ended, and the tokens of prompt and response."""
    prompt = calls.prompt(asked)
    generation = scripted_generation(calls.processor, prompt, asked.images, text)
    if finish_reason == "length":
        cut = generation.response_token_ids[:-1]
        generation = type(generation)(**vars(generation) | {"response_token_ids": cut, "finish_reason": "length"})
    message, reason = calls.add(asked, prompt, generation)
    return message, reason, np.concatenate([prompt, generation.response_token_ids])


def test_a_prompt_is_what_the_template_writes(processor: Processor) -> None:
    asked = request(processor, [{"role": "developer", "content": "be brief"}, user("what?", screenshot(1))])
    prompt = Conversations(processor).prompt(asked)
    assert decoded(processor, prompt) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat?<|vision_start|><|image_pad|><|vision_end|>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert asked.images == [screenshot(1)]


def test_a_continued_conversation_keeps_the_generated_tokens(tools_processor: Processor) -> None:
    processor, calls = tools_processor, Conversations(tools_processor)
    history = [user("go", screenshot(1))]
    for turn in range(3):
        asked = request(processor, history, tools=[CLICK])
        message, reason, tokens = answer(calls, asked, f"I click. {turn}\n{CALL}")
        assert reason == "tool_calls"
        (call,) = message["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("click", {"x": 5})
        assert message["content"] == f"I click. {turn}"
        call["function"]["arguments"] = '{"x":5}'  # as another library writes it
        result = {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        history = [*history, message, result, user("and now?", screenshot(turn))]
        later = calls.prompt(request(processor, history, tools=[CLICK]))
        assert later[: len(tokens)].tolist() == tokens.tolist()
        assert decoded(processor, later[len(tokens) :]) == (
            "\n<|im_start|>tool\ndone<|im_end|>\n<|im_start|>user\nand now?<|vision_start|><|image_pad|><|vision_end|>"
            "<|im_end|>\n<|im_start|>assistant\n"
        )


def test_a_rewritten_history_is_rendered_by_the_template(tools_processor: Processor) -> None:
    processor, calls = tools_processor, Conversations(tools_processor)
    first = [user("go", screenshot(1))]
    message, _, _ = answer(calls, request(processor, first, tools=[CLICK]), f"I click.\n{CALL}")
    more = user("next")
    same = calls.prompt(request(processor, [*first, message, more], tools=[CLICK]))
    assert CALL in decoded(processor, same)
    for changed in (
        request(processor, [user("go on", screenshot(1)), message, more], tools=[CLICK]),
        request(processor, [user("go", screenshot(2)), message, more], tools=[CLICK]),
        request(processor, [*first, message | {"content": "I press."}, more], tools=[CLICK]),
        request(processor, [*first, message, more]),
    ):
        expected = processor.encode_chat(changed.messages, changed.tools)
        assert calls.prompt(changed).tolist() == expected.tolist()


def test_thoughts_stay_in_a_continued_conversation(processor: Processor) -> None:
    calls, first = Conversations(processor), [user("go")]
    message, reason, tokens = answer(calls, request(processor, first), "<think>\nhm\n</think>\n\nclick")
    assert (message, reason) == ({"role": "assistant", "content": "click", "reasoning_content": "hm"}, "stop")
    without = {"role": "assistant", "content": [{"type": "text", "text": "click"}]}
    later = calls.prompt(request(processor, [*first, without, user("next")]))
    assert later[: len(tokens)].tolist() == tokens.tolist()


def test_a_cut_response_gets_its_end_in_the_next_prompt(processor: Processor) -> None:
    calls, first = Conversations(processor), [user("go")]
    message, reason, tokens = answer(calls, request(processor, first), "too lo", "length")
    assert reason == "length"
    later = calls.prompt(request(processor, [*first, message, user("next")]))
    assert later[: len(tokens) + 1].tolist() == [*tokens.tolist(), processor.eos_token_id]


def test_a_response_with_special_tokens_is_not_repeated_as_tokens(processor: Processor) -> None:
    calls, first = Conversations(processor), [user("go")]
    message, _, tokens = answer(calls, request(processor, first), "a<|image_pad|>b")
    later = calls.prompt(request(processor, [*first, message, user("next")]))
    assert processor.image_token_id in tokens
    assert processor.image_token_id not in later


def test_text_of_a_request_has_no_special_tokens(tools_processor: Processor) -> None:
    processor = tools_processor
    named = {"type": "function", "function": {"name": "click", "description": HOSTILE}}
    calls = [{"id": "1", "function": {"name": "click", "arguments": json.dumps({"text": HOSTILE})}}]
    messages = [
        {"role": "system", "content": HOSTILE}, user(HOSTILE),
        {"role": "assistant", "content": HOSTILE, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": HOSTILE},
    ]  # fmt: skip
    prompt = Conversations(processor).prompt(request(processor, messages, tools=[named]))
    assert processor.image_token_id not in prompt
    assert int((prompt == processor.eos_token_id).sum()) == 5  # one for each message and the tools
    text = decoded(processor, prompt)
    assert text.count("<tool_call></tool_call>") == 1  # of the author's instructions
    assert text.count("<tool_call>") == 2  # and of the call


@pytest.mark.parametrize("text", ["<tool_call>\nno JSON\n</tool_call>", '<tool_call>\n{"arguments": {}}\n</tool_call>'])
def test_what_is_no_call_stays_text(tools_processor: Processor, text: str) -> None:
    calls = Conversations(tools_processor)
    message, reason, _ = answer(calls, request(tools_processor, [user("go")], tools=[CLICK]), f"so: {text}")
    assert (message["content"], "tool_calls" in message, reason) == (f"so: {text}", False, "stop")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"model": "gpt-9"}, "model='gpt-9' is not 'policy'"),
        ({"n": 2}, "n=2 is not possible"),
        ({"response_format": {"type": "json_object"}}, "response_format="),
        ({"tool_choice": "required"}, "tool_choice="),
        ({"logprobs": True}, "logprobs=true"),
        ({"guided_json": {}}, "guided_json is not known"),
        ({"max_tokens": -1}, "max_tokens=-1"),
        ({"stop": [""]}, "stop="),
        ({"messages": []}, "messages is not"),
        ({"messages": [{"role": "robot", "content": ""}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"messages\[0\].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, r"messages\[0\].content\[0\].type='audio'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b"}}]}]},
         "addresses are not fetched"),
        ({"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}]}, "image_url.url: "),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_by_name(processor: Processor, options: dict[str, Any], named: str) -> None:
    body = {"model": "policy", "messages": [user("a")]} | options
    with pytest.raises(RequestRefused, match=named):
        parse_request(json.dumps(body).encode(), processor)
    for text in (b"{", b"[]"):
        with pytest.raises(RequestRefused):
            parse_request(text, processor)
