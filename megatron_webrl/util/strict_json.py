"""JSON as its standard (RFC 8259) has it, without what Python's parser accepts besides."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


class RepeatedKey(ValueError):
    """An object has a key twice."""


def loads(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN, numbers beyond float64 and repeated keys, and RecursionError."""
    return _DECODER.decode(text)


def refuse_constant(constant: str) -> NoReturn:
    """For `parse_constant` of json.loads: raises ValueError."""
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the range of a number")
    return number


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook` of json.loads: the object. Raises RepeatedKey."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise RepeatedKey(f"the key {json.dumps(twice)} occurs twice")
    return result


_DECODER = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite, object_pairs_hook=unique_keys)
