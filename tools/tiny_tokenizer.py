"""A small byte-level BPE tokenizer for tiny models: any text in few entries, an action in about ten tokens.

Qwen's own tokenizer splits numbers into digits and has no entries for the glue of a tool call, so an action
takes some forty tokens. Here whole pieces of the tool call and every coordinate that is a multiple of
COORDINATE_STEP are entries of their own, which makes actions short enough for a tiny model to learn. The
added vocabulary and the role of each added token are Qwen's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.rollout import contexts
from megatron_webrl.rollout.toolset import describe_action, format_tool_call
from megatron_webrl.tasks.click_target import COORDINATE_STEP
from megatron_webrl.types import COORDINATE_RANGE, Action

_SEPARATOR = ", "  # between two numbers
SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added to the vocabulary, but part of the text when special tokens are left out of it, as in Qwen's."""

CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}{{ content }}{%- else -%}
{%- for item in content -%}
{%- if item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ item.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_INSTRUCTIONS = (
    "Click the button.",
    'Click on the "ok" button.',
    "Click button ONE, then click button TWO.",
    'Click the button in the dialog box labeled "x".',
    'Close the dialog box by clicking the "x".',
    "Focus into the textbox.",
    "Focus into the 3rd input textbox.",
    "Click on the colored box.",
    "Click on the red colored box.",
    'Enter "text" into the text field and press Submit.',
    "Select yes, no and maybe and click Submit.",
    'Click on the link "here".',
    "Select an option from the list.",
    "Click on Tab #2.",
    "Expand the section below and click submit.",
    "Switch between the tabs to find and click on the link.",
    "Click on the grid coordinate (-1, 2).",
    "Find the center of the circle and click on it.",
    "Type the following date into the field: 05/12/2013 and press submit.",
    "Enter the username and the password, then login.",
    "Scroll down the page, read the last line and answer the question.",
    "Click the small blue square.",
    "Click on the largest circle.",
    "How many triangles are there? Pick the number.",
    "Choose the item with the highest price.",
    "green yellow black white purple orange pink cyan magenta grey olive",
    "first second third fourth fifth last next previous above below left right top bottom",
    "shape triangle rectangle square circle letter digit number word name item table "
    "menu widget slider spinner checkbox radio",
)

_ACTIONS = (
    Action("left_click", coordinate=(111, 222)),
    Action("type", text="333"),
    Action("type", coordinate=(111, 222), text="333"),
    Action("scroll", direction="down"),
    Action("scroll", direction="up"),
    Action("wait", time=1.0),
    Action("wait"),
    Action("go_back"),
    Action("navigate", url="444"),
    Action("answer", text="555"),
)

_FORMS = (
    ("Answer with exactly one tool call and nothing else:\n", ""),
    (
        "Answer in this form, with exactly one tool call:\nThought: what you see and what follows from it\n"
        "Action: what you do, in a few words\n",
        "Thought: The next step is {}.\nAction: {}\n",
    ),
    (
        "Answer in this form, with exactly one tool call:\n"
        'Progress: {"done": [what is achieved], "open": [what is left]}\n'
        "Intention: what the next step is for\nAction: what you do, in a few words\n",
        'Progress: {{"done": [], "open": []}}\nIntention: Do the task.\nAction: {}\n',
    ),
)
"""Samples of instructions and fields of responses. They are fixed: the kept models have the vocabulary they give."""


def action_texts() -> list[str]:
    """A tool call of each kind of action, with a number for each value that varies."""
    return [format_tool_call(action) for action in _ACTIONS]


def corpus() -> list[str]:
    """Texts like those of a prompt and of a response, made by what makes the real ones."""
    texts = list(_INSTRUCTIONS)
    for compact in (False, True):
        texts.append(contexts.task_text("Click the button.", "http://127.0.0.1/click-test.html", 3, [], compact))
        texts.append(
            contexts.step_result_text("page changed", "Click Test Task", "http://127.0.0.1/click-test.html", compact)
        )
        system = contexts.system_message(ContextConfig(response_format="bare", compact=compact))
        for form, fields in _FORMS:
            texts.append(system if compact else system.replace(_FORMS[0][0], form))
            texts += [("" if compact else _fields(fields, action)) + format_tool_call(action) for action in _ACTIONS]
    for effect in ("page changed", "page unchanged", "executed", "failed: no page to go back to"):
        for action in _ACTIONS:
            texts.append(contexts.history_line(1, "Enter Text Task", describe_action(action), effect, compact=False))
            texts.append(contexts.history_line(2, "", describe_action(action), effect, compact=True))
    return texts


def _fields(sample: str, action: Action) -> str:
    described = describe_action(action)
    return sample.format(described, described)


def whole_pieces(actions: Iterable[str]) -> list[str]:
    """What is the same in every action of a kind: the text between tool-call tags and numbers, each once."""
    pieces: set[str] = set()
    for text in actions:
        for piece in re.split(r"</?tool_call>|\d+", text):
            if len(piece) > 2 and re.search(r"[^\w\s]", piece):
                pieces.add(piece)
    return sorted(pieces, key=lambda piece: (-len(piece), piece))


def build_tokenizer(texts: list[str], actions: list[str], vocabulary: int) -> Tokenizer:
    """Train on `texts`; entries in all at most `vocabulary`. Deterministic.

    Raises ValueError if `vocabulary` has no room for bytes, pieces, coordinates and added tokens.
    """
    pieces = whole_pieces(actions)
    numbers = [_SEPARATOR, *(str(number) for number in range(0, COORDINATE_RANGE + 1, COORDINATE_STEP))]
    added = len(SPECIAL_TOKENS) + len(PLAIN_TOKENS)
    room = vocabulary - added - len(pieces) - len(numbers)
    if room < 256:
        raise ValueError(f"vocabulary={vocabulary} has no room for 256 bytes, {len(pieces)} pieces, {len(numbers)} "
                         f"coordinates and {added} added tokens; give at least {vocabulary - room + 256}")  # fmt: skip
    trained = _empty(models.BPE(), pieces)
    trainer = trainers.BpeTrainer(
        vocab_size=room, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    trained.train_from_iterator((text for text in texts for _ in range(2)), trainer)
    model = json.loads(trained.to_str())["model"]
    entries: dict[str, int] = model["vocab"]
    for piece in [*pieces, *numbers]:
        entries.setdefault(_as_bytes(piece), len(entries))
    merges = [tuple(merge) for merge in model["merges"]]
    # ignore_merges: a piece or number that is an entry is one token although no merges lead to it.
    tokenizer = _empty(models.BPE(entries, merges, ignore_merges=True), pieces)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in PLAIN_TOKENS])
    return tokenizer


def _empty(model: models.BPE, pieces: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    words = "|".join([*(re.escape(piece) for piece in pieces), rf"(?<=\d){_SEPARATOR}(?=\d)", _WORDS])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _as_bytes(text: str) -> str:
    """How byte-level BPE writes `text` in its vocabulary."""
    return "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))
