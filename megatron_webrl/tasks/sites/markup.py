"""HTML helpers. Values of type Html are markup; all other text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NewType
from urllib.parse import urlencode

Html = NewType("Html", str)


def text(value: object) -> Html:
    """A value as escaped text."""
    return Html(escape(str(value)))


def join(parts: Iterable[Html]) -> Html:
    return Html("".join(parts))


def tag(name: str, *children: Html, css: str = "") -> Html:
    style = f' class="{escape(css)}"' if css else ""
    return Html(f"<{name}{style}>{''.join(children)}</{name}>")


def build_path(path: str, /, **query: str | int) -> str:
    """A path with a query string, without empty values and page=1."""
    kept = {name: value for name, value in query.items() if value != "" and (name, value) != ("page", 1)}
    return f"{path}?{urlencode(kept)}" if kept else path


def link(href: str, label: str, css: str = "") -> Html:
    style = f' class="{escape(css)}"' if css else ""
    return Html(f'<a{style} href="{escape(href)}">{escape(label)}</a>')


def form(action: str, *fields: Html, button: str, css: str = "", method: str = "post") -> Html:
    return Html(
        f'<form class="{escape(css)}" method="{method}" action="{escape(action)}" autocomplete="off">'
        f'{"".join(fields)}<button type="submit">{escape(button)}</button></form>'
    )


def hidden_field(name: str, value: str) -> Html:
    return Html(f'<input type="hidden" name="{escape(name)}" value="{escape(value)}">')


def text_field(name: str, label: str, hint: str = "", value: str = "", kind: str = "text") -> Html:
    return Html(
        f'<label class="field"><span>{escape(label)}</span><input type="{kind}" name="{escape(name)}" '
        f'value="{escape(value)}" placeholder="{escape(hint)}" required></label>'
    )


def text_area(name: str, label: str, hint: str = "") -> Html:
    return Html(
        f'<label class="field"><span>{escape(label)}</span><textarea name="{escape(name)}" rows="4" '
        f'placeholder="{escape(hint)}" required></textarea></label>'
    )


def radio_group(name: str, label: str, options: Sequence[tuple[str, str]], chosen: str = "") -> Html:
    """Required radio buttons of (value, label)."""
    inputs = join(
        Html(
            f'<label class="choice"><input type="radio" name="{escape(name)}" value="{escape(value)}" required'
            f"{' checked' if value == chosen else ''}> {escape(caption)}</label>"
        )
        for value, caption in options
    )
    return Html(f'<fieldset class="field"><legend>{escape(label)}</legend>{inputs}</fieldset>')


def table(heads: Sequence[str], rows: Iterable[Sequence[Html]]) -> Html:
    head = join(tag("th", text(name)) for name in heads)
    body = join(tag("tr", *(tag("td", cell) for cell in row)) for row in rows)
    return Html(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def definition_list(rows: Iterable[tuple[str, Html]]) -> Html:
    return tag("dl", *(join((tag("dt", text(name)), tag("dd", value))) for name, value in rows), css="facts")


def pager(path: str, page: int, pages: int, /, **query: str | int) -> Html:
    """Links to the pages of a list; empty for a single page."""
    if pages < 2:
        return Html("")
    parts = [link(build_path(path, **query, page=page - 1), "Previous")] if page > 1 else []
    for n in range(1, pages + 1):
        parts.append(tag("b", text(n)) if n == page else link(build_path(path, **query, page=n), str(n)))
    if page < pages:
        parts.append(link(build_path(path, **query, page=page + 1), "Next"))
    return tag("nav", *parts, css="pager")


def dialog(title: str, body: Html, *buttons: Html) -> Html:
    inner = tag("div", tag("h2", text(title)), body, tag("div", *buttons, css="buttons"), css="dialog")
    return tag("div", inner, css="veil")


def page_count(items: int, per_page: int) -> int:
    """Number of pages of a list; at least 1."""
    return max(1, -(-items // per_page))
