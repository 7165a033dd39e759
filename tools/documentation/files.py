"""The generated files of docs/ and the functions that make their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tools.documentation import command_page, configuration_page, http_page

PAGES = Path(__file__).parents[2] / "docs"
FILES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page.page,
    "commands.md": command_page.page,
    "http_api.md": http_page.page,
}
