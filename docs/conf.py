"""Sphinx's configuration of the documentation site: `make docs-site`, `make docs-serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sphinx.directives.code import CodeBlock

from megatron_webrl import __version__

if TYPE_CHECKING:
    from docutils.nodes import Node
    from sphinx.application import Sphinx

project = "megatron_webrl"
version = release = __version__
copyright = f"the authors of {project}; Apache-2.0"
extensions = ["myst_parser"]
exclude_patterns = ["images"]

smartquotes = False  # an option such as --check stays one

html_theme = "furo"
html_title = f"{project} {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_use_index = False
html_show_sourcelink = html_copy_source = False  # the Markdown files are in the repository

CODE = {"bash", "python", "yaml", "json"}
myst_heading_anchors = 4  # GitHub's anchors
myst_fence_as_directive = CODE


class MarkedBlock(CodeBlock):
    """A code block whose mark (CONTRIBUTING.md), as in ```bash checked, is a class that the style sheet shows."""

    optional_arguments = 1

    def run(self) -> list[Node]:
        """The block in the language that is the directive's name."""
        if not self.arguments:
            raise self.error(f"the block says neither run=TEST nor checked: ```{self.name}")
        mark, self.arguments = self.arguments[0].partition("=")[0], [self.name]
        nodes = super().run()
        nodes[0]["classes"].append(f"mark-{mark}")
        return nodes


def setup(app: Sphinx) -> None:
    """Register the directives of code blocks."""
    for language in CODE:
        app.add_directive(language, MarkedBlock)
