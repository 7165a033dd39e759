"""The code blocks of README.md, CONTRIBUTING.md and docs/, with their marks: see CONTRIBUTING.md."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code: ```LANGUAGE MARK."""

    page: str
    line: int
    section: str  # the heading above it
    language: str
    mark: str  # run=TEST, checked, output or sketch; "" without one
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, without the directives of Sphinx."""
    text = (ROOT / page).read_text()
    found = []
    for fence in FENCE.finditer(text):
        language, _, mark = fence[2].partition(" ")
        section = HEADING.findall(FENCE.sub("", text[: fence.start()]))[-1]
        code = "".join(line.removeprefix(fence[1]) for line in fence[3].splitlines(keepends=True))
        if not language.startswith("{"):
            found.append(Block(page, text.count("\n", 0, fence.start()) + 1, section, language, mark, code))
    return found


def blocks_run_by(test: str, page: str, language: str, section: str | None = None) -> list[str]:
    """The blocks that a page marks as run by a test module, given as `__file__`; of one section, or of all."""
    mark = f"run={Path(test).relative_to(ROOT)}"
    return [
        block.text
        for block in blocks_of(page)
        if (block.mark, block.language) == (mark, language) and section in (None, block.section)
    ]


def command_environment() -> dict[str, str]:
    """Environment variables with which `python` and `webrl` are those of the tests, and the package this checkout's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
