"""Write the reference page of the configuration from the dataclasses of config/schema.py."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config


def page() -> str:
    """The page as Markdown with a table for each section."""
    lines = [
        "# Configuration",
        "",
        "Settings of a run: `webrl train FILE key=value ...`. "
        "Written by `make docs` from `megatron_webrl/config/schema.py`.",
    ]
    _section(Config(), "", lines)
    return "\n".join(lines) + "\n"


def _section(config: Any, prefix: str, lines: list[str]) -> None:
    nested = [f for f in dataclasses.fields(config) if dataclasses.is_dataclass(getattr(config, f.name))]
    plain = [f for f in dataclasses.fields(config) if f not in nested]
    if plain:
        lines += ["", f"## {prefix.rstrip('.')}", "", "| key | default | limits | meaning |", "|---|---|---|---|"]
    for spec in plain:
        default = getattr(config, spec.name)
        lines.append(
            f"| `{prefix}{spec.name}` | `{_format_default(default)}` | {_limits(spec.metadata)} "
            f"| {spec.metadata['help']} |"
        )
    for spec in nested:
        _section(getattr(config, spec.name), f"{prefix}{spec.name}.", lines)


def _format_default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else str(value)


def _limits(limits: Any) -> str:
    if limits["choices"]:
        return ", ".join(f"`{choice}`" for choice in limits["choices"])
    formats = [("> {}", "above"), (">= {}", "low"), ("<= {}", "high")]
    return ", ".join(text.format(limits[name]) for text, name in formats if limits[name] is not None)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="Markdown file to write")
    parser.parse_args().file.write_text(page())


if __name__ == "__main__":
    main()
