"""JSON as its standard (RFC 8259) has it, without what Python's parser accepts besides."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def loads(text: str) -> Any:
    """Parse JSON. Raises ValueError, also for NaN, numbers beyond float64 and repeated keys, and RecursionError."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_without_duplicates)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is beyond the range of a number")
    return number


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in result if names.count(name) > 1)
        raise ValueError(f"the key {json.dumps(twice)} occurs twice")
    return result
