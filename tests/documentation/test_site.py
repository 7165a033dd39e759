"""The documentation site builds without a warning and loads nothing from elsewhere; generated files are current."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from megatron_webrl import __version__
from tests.documented_blocks import ROOT
from tools.documentation.files import FILES, PAGES

LOADED = re.compile(r'<(?:img|script|link|iframe|source|video)\b[^>]*? (?:src|href|srcset)="([^"]+)"')


@pytest.mark.slow
def test_the_site_builds_has_every_page_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", str(PAGES), str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert {path.stem for path in PAGES.glob("*.md")} <= {path.stem for path in site.rglob("*.html")}
    assert f"megatron_webrl {__version__}" in (site / "index.html").read_text()
    assert "staleness" in (site / "searchindex.js").read_text()
    for path in site.rglob("*.html"):
        loaded = LOADED.findall(path.read_text())
        assert loaded, path
        for address in map(urlsplit, loaded):
            assert not address.scheme, f"{path.name}: {address.geturl()}"
            assert not address.netloc, f"{path.name}: {address.geturl()}"
            if address.path:  # else it is the page itself
                assert (path.parent / unquote(address.path)).is_file(), f"{path.name}: {address.geturl()}"
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        assert not re.search(r'@import|url\(http|href="http', path.read_text()), path.name


def test_a_test_that_a_page_names_exists() -> None:
    there = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for path in [*PAGES.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        assert set(re.findall(r"test_\w+\.py", path.read_text())) <= there, path.name


@pytest.mark.parametrize("name", FILES)
def test_a_generated_file_is_the_one_that_make_docs_writes(name: str) -> None:
    assert (PAGES / name).read_text() == FILES[name](), "run make docs"
