"""Types of command-line arguments that tools share."""

from __future__ import annotations

import argparse
import math
from typing import Any


def bounded_number(kind: type, low: float, exclusive: bool = False) -> Any:
    """For argparse: a finite number of at least, or above, `low`."""

    def read(text: str) -> Any:
        value = kind(text)
        if value < low or (exclusive and value == low) or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if exclusive else 'at least'} {low}")
        return value

    read.__name__ = "number"
    return read
