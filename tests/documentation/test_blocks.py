"""Every code block says whether a test runs it. One that is not run is checked: Python compiles, settings load.

Commands are checked in test_commands.py.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from megatron_webrl.config.load import parse_config
from megatron_webrl.judge.command import load_judge_config
from tests.documented_blocks import FENCE, PAGES, ROOT, Block, blocks_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
MARKS = {
    "bash": {"checked"}, "python": {"checked"}, "yaml": {"checked"}, "json": {"checked"}, "text": {"output", "sketch"},
}  # fmt: skip


def checked(language: str) -> list[Block]:
    return [block for block in BLOCKS if (block.language, block.mark) == (language, "checked")]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_whether_a_test_runs_it(page: str) -> None:
    silent = [
        f"{block}: ```{block.language} {block.mark}"
        for block in blocks_of(page)
        if block.mark not in MARKS.get(block.language, ()) and not block.mark.startswith("run=")
    ]
    assert not silent, "see CONTRIBUTING.md, Code blocks"


def test_a_test_that_is_named_takes_its_blocks_from_the_page() -> None:
    run = {(block.mark.removeprefix("run="), block.page) for block in BLOCKS if block.mark.startswith("run=")}
    assert len(run) > 4
    for test, page in run:
        source = (ROOT / test).read_text()
        assert "blocks_run_by(__file__, " in source, test
        assert page in source, test


@pytest.mark.parametrize("block", checked("python"), ids=str)
def test_a_python_block_that_is_not_run_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", checked("yaml"), ids=str)
def test_a_yaml_block_is_a_valid_configuration(block: Block, tmp_path: Path) -> None:
    """Of the judge's page it is a section judge."""
    documents = list(yaml.safe_load_all(block.text))
    assert all(documents)
    for document in documents:
        (file := tmp_path / "documented.yaml").write_text(yaml.safe_dump(document))
        if block.page == "docs/judge.md":
            load_judge_config(file, [])
        else:
            parse_config(file)


@pytest.mark.parametrize("block", checked("json"), ids=str)
def test_a_json_block_is_json_lines(block: Block) -> None:
    assert [json.loads(line) for line in block.text.splitlines()]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_html_which_would_hide_what_looks_like_it(page: str) -> None:
    text = re.sub(r"`[^`]+`|<!--.*?-->", "", FENCE.sub("", (ROOT / page).read_text()))
    assert re.findall(r"(?<!\\)<[a-zA-Z/!][^>]*>", text) == []


def test_the_readme_lists_the_pages_of_the_site_in_the_same_parts() -> None:
    parts = {
        caption.lower(): pages.split()
        for caption, pages in re.findall(
            r"```{toctree}\n:caption: ([^\n]*)\n\n(.*?)```", read("docs/index.md"), re.DOTALL
        )
    }
    rows = re.findall(r"^\| (.*?) \| (\[.*) \|$", read("README.md").split("## Documentation")[1], re.MULTILINE)
    assert {part: re.findall(r"\(docs/(\w+)\.md\)", links) for part, links in rows} == parts


def read(page: str) -> str:
    return (ROOT / page).read_text()
