"""The documentation site builds without a warning and loads nothing from elsewhere; generated files are current."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.documented_blocks import ROOT
from tools.documentation.files import FILES, PAGES

LOADED = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "srcset", "video": "src"}


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """Build the site as `make docs-site` does."""
    return subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", str(source), str(target)],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    target = tmp_path_factory.mktemp("site")
    done = build(PAGES, target)
    assert done.returncode == 0, done.stderr
    return target


class References(HTMLParser):
    """What a page loads and links to, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors.add(found.get("id") or "")
        if tag == "a" and (href := found.get("href")):
            self.links.append(href)
        elif tag in LOADED and (address := found.get(LOADED[tag])):
            self.loaded.append(address)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, References]:
    return {path: References(path) for path in sorted(site.rglob("*.html"))}


def test_every_page_is_built(pages: dict[Path, References]) -> None:
    assert {path.stem for path in PAGES.glob("*.md")} <= {path.stem for path in pages}


def test_a_page_loads_nothing_from_elsewhere(site: Path, pages: dict[Path, References]) -> None:
    for path, found in pages.items():
        assert found.loaded
        for address in map(urlsplit, found.loaded):
            assert not address.scheme, f"{path.name}: {address.geturl()}"
            assert not address.netloc, f"{path.name}: {address.geturl()}"
            if address.path:  # else it is the page itself
                assert (path.parent / unquote(address.path)).is_file(), f"{path.name}: {address.geturl()}"
    for path in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        text = path.read_text()
        assert "@import" not in text, path.name
        assert "url(http" not in text, path.name
        assert 'href="http' not in text, path.name


def test_links_and_anchors_lead_somewhere(pages: dict[Path, References]) -> None:
    broken = []
    for path, found in pages.items():
        for address in map(urlsplit, found.links):
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            anchors = pages[target].anchors if target in pages else {""} if target.is_file() else set()
            if unquote(address.fragment) not in anchors | {""} or not anchors:
                broken.append(f"{path.name}: {address.geturl()}")
    assert not broken


def test_the_site_shows_the_version_and_can_be_searched(site: Path) -> None:
    from megatron_webrl import __version__

    front = (site / "index.html").read_text()
    assert f"megatron_webrl {__version__}" in front
    assert "theme-toggle" in front  # light, dark
    assert "staleness" in (site / "searchindex.js").read_text()


MISTAKES = {
    "[a](missing.md)": "missing.md",
    "[an anchor](index.md#missing)": "'missing'",
    "```bash\nls\n```": "neither run=TEST nor checked",
    "![a picture](images/missing.svg)": "missing.svg",
}


def test_a_mistake_in_a_page_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((PAGES / "conf.py").read_text())
    (source / "_static").symlink_to(PAGES / "_static")
    (source / "index.md").write_text("# Front\n\n```{toctree}\npage\n```\n")
    (source / "page.md").write_text("\n\n".join(["# Page", *MISTAKES]) + "\n")
    (source / "in_no_part.md").write_text("# Page of no part\n")
    done = build(source, tmp_path / "site")
    assert done.returncode != 0
    for message in [*MISTAKES.values(), "isn't included in any toctree"]:
        assert message in done.stderr


@pytest.mark.parametrize("name", FILES)
def test_a_generated_file_is_the_one_that_make_docs_writes(name: str) -> None:
    assert (PAGES / name).read_text() == FILES[name](), "run make docs"
