"""Fences around data that a judge model must not take for instructions: the task, the answer, titles, URLs, actions.

    ----- BEGIN ANSWER 5f0c1d2e3a4b -----
    the data
    ----- END ANSWER 5f0c1d2e3a4b -----

The nonce is derived from a digest of all data of the request, so that equal requests are equal, and does not occur in
them: nobody can write the closing line of a fence into its data. Data that look like a fence, or like a special token
of a chat template, are rewritten.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence

NAMES = ("TASK", "ANSWER", "RUBRIC", "FACT", "REFERENCE", "ACTIONS", "PAGES", "KEY_POINTS", "NOTES")
MAX_FIELD_CHARS = 20_000
NONCE_DIGITS = 12

_LINE = re.compile(rf"----- (BEGIN|END) ({'|'.join(NAMES)}) ([0-9a-f]{{{NONCE_DIGITS}}}) -----")
_BREAKS = re.compile("\r\n|[\r\v\f\x1c-\x1e\x85\u2028\u2029]")
_INVISIBLE = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")
_FENCE_WORD = re.compile(r"[\W_]*(?:BEGIN|END)\b", re.IGNORECASE)
_DASHES = re.compile("[-=_*#~\u2010-\u2015\u2500\u2501]{3}")
_TOKEN_NAMES = (
    "think|tool_call|tool_response|tools|s|bos|eos|pad|unk|mask|image|img|video|audio|box|quad|ref|system|user|"
    r"assistant|im_start|im_end|start_of_turn|end_of_turn|start_of_image|end_of_image|sys"
)
_TOKENS = re.compile(rf"<[^\S\n]*(?=[|\uff5c]|<\s*/?\s*sys|/?\s*(?:{_TOKEN_NAMES})\s*>)", re.IGNORECASE)
_BRACKET_TOKENS = re.compile(r"\[(?=/?(?:INST|SYS|IMG|TOOL|AVAILABLE|SYSTEM)[A-Z_]*\])", re.IGNORECASE)


def fence_fields(fields: Sequence[tuple[str, str]]) -> str:
    """The data of a request in fences, in order. Raises ValueError for a name that is not one of NAMES."""
    cleaned = [(name, clean_data(text)) for name, text in fields]
    nonce = _nonce(cleaned)
    lines = []
    for name, text in cleaned:
        if name not in NAMES:
            raise ValueError(f"fence {name!r} is not one of {', '.join(NAMES)}")
        lines += [f"----- BEGIN {name} {nonce} -----", text, f"----- END {name} {nonce} -----"]
    return "\n".join(lines)


def parse_fences(text: str) -> dict[str, str]:
    """The data of a text of `fence_fields`, by name. Raises ValueError if the fences are not balanced and unique."""
    fields: dict[str, str] = {}
    name, nonce = "", ""
    data: list[str] = []
    for line in text.split("\n"):
        match = _LINE.fullmatch(line)
        if not name:
            if match and match[1] == "BEGIN" and match[3] == (nonce or match[3]) and match[2] not in fields:
                name, nonce, data = match[2], match[3], []
                continue
            raise ValueError(f"text outside of the fences: {line[:80]!r}")
        if match and match.groups() == ("END", name, nonce):
            fields[name], name = "\n".join(data), ""
        elif nonce in line:
            raise ValueError(f"the nonce occurs within {name}")
        else:
            data.append(line)
    if name:
        raise ValueError(f"the fence {name} does not end")
    return fields


def clean_data(text: str) -> str:
    """Data as they stand in a fence: line breaks unified, invisible characters removed, fences and special tokens
    rewritten, at most MAX_FIELD_CHARS characters."""
    text = _INVISIBLE.sub("", _BREAKS.sub("\n", text))
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs"))
    if len(text) > MAX_FIELD_CHARS:
        left_out = len(text) - MAX_FIELD_CHARS
        text = f"{text[:MAX_FIELD_CHARS]}\n({left_out} more characters are not shown)"
    text = _BRACKET_TOKENS.sub("[ ", _TOKENS.sub("< ", text))
    return "\n".join(map(_clean_line, text.split("\n")))


def _clean_line(line: str) -> str:
    """The line; one that looks like a fence loses its beginning, up to the word."""
    match = _FENCE_WORD.match(line)
    return f"(not a fence) {line[match.end() :]}" if match and _DASHES.search(line) else line


def _nonce(fields: Sequence[tuple[str, str]]) -> str:
    digest = hashlib.sha256("\0".join(part for field in fields for part in field).encode())
    while any(digest.hexdigest()[:NONCE_DIGITS] in text for _, text in fields):
        digest.update(b"again")
    return digest.hexdigest()[:NONCE_DIGITS]
