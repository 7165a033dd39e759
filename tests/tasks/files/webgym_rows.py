"""Rows in WebGym's format."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def webgym_row(number: int, **fields: Any) -> dict[str, Any]:
    """A row with every field, on the website site<number>.example.com, unless `fields` says otherwise."""
    row = {
        "benchmark_name": "Bench",
        "task_name": f"Find the price of item {number}",
        "domain": "Shopping & Food",
        "subdomain": "groceries",
        "website": f"site{number}.example.com",
        "definite_answer": f"{number} dollars",
        "task_id": f"task-{number}",
        "difficulty": 1 + number % 9,
        "evaluator_reference": [{"id": 1, "description": "The price", "facts": [f"It costs {number} dollars"]}],
    }
    return row | fields


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
