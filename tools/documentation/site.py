"""Build the documentation site: the working tree's pages, and those of each release, which is a git tag such as v1.2.

    python -m tools.documentation.site [FOLDER]     (make docs-site)

FOLDER has the working tree's pages, FOLDER/<tag> a release's. Each page links to all versions. A warning is an error,
but of a release it is shown only: its pages are as they are.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"


def build_site(root: Path, site: Path) -> int:
    """Build all versions of the checkout `root`; returns the first exit code of sphinx-build that is not 0."""
    tags = _git(root, "tag", "--list", "v[0-9]*", "--sort=-v:refname").split() if (root / ".git").exists() else []
    codes = [_build(root, site, tags, "")]
    with tempfile.TemporaryDirectory(prefix="webrl-docs-") as folder:
        for tag in tags:
            tree = Path(folder) / tag
            _git(root, "worktree", "add", "--quiet", "--detach", str(tree), tag)
            try:
                codes.append(_build(tree, site / tag, tags, tag))
            finally:
                _git(root, "worktree", "remove", "--force", str(tree))
    return next((code for code in codes if code), 0)


def _build(tree: Path, site: Path, tags: list[str], shown: str) -> int:
    strict = [] if shown else ["-W", "--keep-going"]
    names = {"DOCS_RELEASES": " ".join(tags), "DOCS_RELEASE_SHOWN": shown, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "sphinx", "-q", "-n", *strict, str(tree / "docs"), str(site)]
    return subprocess.run(command, cwd=tree, env={**os.environ, **names}, check=False).returncode


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", str(root), *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=SITE, help="folder to write to (default: build/site)")
    site: Path = parser.parse_args().folder
    code = build_site(ROOT, site)
    if not code:
        print(f"open {site / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
