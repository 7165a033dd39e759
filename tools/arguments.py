"""Command-line arguments and output that tools share."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def bounded_number(kind: type, low: float, exclusive: bool = False) -> Any:
    """An argparse type: a finite number of at least `low`, or above it if `exclusive`."""

    def read(text: str) -> Any:
        value = kind(text)
        if value < low or (exclusive and value == low) or not math.isfinite(value):
            raise argparse.ArgumentTypeError(f"{text} is not {'above' if exclusive else 'at least'} {low}")
        return value

    read.__name__ = "number"
    return read


def make_bench_parser(description: str | None, quick: str = "") -> argparse.ArgumentParser:
    """The parser of a benchmark: --json, and --quick where `quick` says what is smaller then."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    return parser


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures to a file; does nothing without a path. Raises OSError."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n")
