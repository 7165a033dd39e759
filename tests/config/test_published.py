"""configs/published/ is what docs/webgym.md says of it: the section "As published" is checked cell by cell."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import flatten_config

ROOT = Path(__file__).parents[2]
FILES = {"WebGym": "webgym_8b.yaml", "AsyncWebRL": "asyncwebrl_8b.yaml"}


def table() -> list[list[str]]:
    """The cells of each row: item, WebGym, AsyncWebRL, default here, configs/published."""
    section = (ROOT / "docs" / "webgym.md").read_text().split("\n## As published\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[1:]]


def statements(cell: str) -> list[tuple[list[str], str]]:
    """Files and statement of each part of the last column: settings, "same", or "differs: ..."."""
    found = []
    for part in cell.split("; "):
        name, _, rest = part.partition(": ")
        found.append(([name], rest) if name in FILES else (list(FILES), part))
    return found


def values(text: str) -> list[tuple[str, object]]:
    """Settings that a text names, such as `rollout.mode=sync`."""
    return [(key, yaml.safe_load(value)) for key, value in re.findall(r"`([a-z_0-9.]+)=([^`]*)`", text)]


def test_the_table_of_the_webgym_page_says_what_the_published_configurations_hold() -> None:
    loaded = {name: flatten_config(parse_config(ROOT / "configs" / "published" / FILES[name])) for name in FILES}
    usual, checked = flatten_config(parse_config(None)), 0
    for item, webgym, asyncwebrl, default, published in table():
        assert all((webgym, asyncwebrl, default)), item
        for key, value in values(default):
            assert usual[key] == value, (item, key)
        for names, statement in statements(published):
            settings = values(statement)
            assert settings or statement == "same" or statement.startswith("differs: "), (item, statement)
            assert len(settings) == statement.count("`") / 2, (item, statement)
            for name in names:
                for key, value in settings:
                    assert loaded[name][key] == value, (item, name, key)
                    checked += 1
    assert checked > 90


def test_the_head_of_each_published_configuration_names_what_differs() -> None:
    for name, file in FILES.items():
        head = (ROOT / "configs" / "published" / file).read_text().partition("\nrun:\n")[0]
        named = re.findall(r"^# - ([^:]+): ", head, re.MULTILINE)
        differing = [
            item for item, *_, published in table()
            if any(name in names and statement.startswith("differs: ") for names, statement in statements(published))
        ]  # fmt: skip
        assert sorted(named) == sorted(differing), file
