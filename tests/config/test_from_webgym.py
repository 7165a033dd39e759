"""docs/webgym.md: the settings on the right exist, and the lines of its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_webrl.config.load import all_settings, parse_config

PAGE = Path(__file__).parents[2] / "docs" / "webgym.md"


def table_rows() -> list[list[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_row_says_what_a_setting_becomes():
    rows = table_rows()
    assert len(rows) > 50
    assert {len(row) for row in rows} == {3}
    assert all(here for _, here, _ in rows)
    assert [row for row in rows if row[1] == "none" and not row[2]] == []


def test_the_settings_on_the_right_exist():
    keys = all_settings()
    known = {".".join(key.split(".")[:depth]) for key in keys for depth in range(1, key.count(".") + 2)}
    named = {span for _, here, remarks in table_rows() for span in re.findall(r"`([a-z_0-9.*]+)[=`]", here + remarks)}
    settings = {each for each in named if each.split(".")[0] in known and "." in each}
    assert len(settings) > 50
    unknown = {each for each in settings if not any(re.fullmatch(each.replace("*", "[a-z_]+"), key) for key in known)}
    assert unknown == set()


def test_the_published_runs_have_the_published_settings():
    for name in ("webgym_8b_4node", "webgym_8b_32node"):
        config = parse_config(PAGE.parents[1] / "configs" / f"{name}.yaml")
        assert (config.rollout.group_size, config.rollout.max_staleness) == (8, 2)
        assert (config.rollout.context.history_turns, config.rollout.context.response_format) == (2, "memory_additive")
        assert config.tasks.max_steps_by_difficulty == {"easy": 10, "medium": 20, "hard": 30}
        assert config.judge.evaluators == ["judge"]
