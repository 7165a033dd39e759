"""The command line and the report of a drill that measures figures and names problems."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.arguments import make_bench_parser, write_json


@dataclass
class Findings:
    """What a drill measured, and where it missed its goals."""

    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def expect(self, holds: bool, problem: str) -> None:
        """Note the problem unless the goal holds."""
        if not holds:
            self.problems.append(problem)


def run(name: str, purpose: str, measure: Callable[[bool], Findings]) -> int:
    """Run `measure(quick)` as `python -m tools.drills.NAME`; returns the exit code, 0 if all goals hold."""
    parser = make_bench_parser(purpose, "the short form")
    parser.prog = f"python -m tools.drills.{name}"
    options = parser.parse_args()
    findings = measure(options.quick)
    for line in lines(findings.figures):
        sys.stdout.write(f"{line}\n")
    for problem in findings.problems[:20]:
        sys.stdout.write(f"FAILED: {problem}\n")
    if left := len(findings.problems) - 20:
        sys.stdout.write(f"FAILED: {left} more\n" if left > 0 else "")
    write_json(options.json, {"figures": findings.figures, "problems": findings.problems})
    return 1 if findings.problems else 0


def lines(figures: Mapping[str, Any]) -> list[str]:
    """A line for each figure."""
    width = max(map(len, figures), default=0)
    return [f"{name:<{width}}  {value:.3f}" if isinstance(value, float) else f"{name:<{width}}  {value}"
            for name, value in figures.items()]  # fmt: skip
