"""Status page of a browser server or router: plain HTML without scripts or external resources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_webrl.browser.server.browser_server import BrowserServer
    from megatron_webrl.browser.server.router.router import Router

REFRESH_SECONDS = 2
_STYLE = (
    "body{font:14px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;width:100%;margin:.5em 0 2em}"
    "th,td{text-align:left;padding:.25em .75em;border-bottom:1px solid #ddd;vertical-align:top}"
    "code{font:13px ui-monospace,monospace}.crashed,.gone{color:#b00020}.acting,.resetting{color:#0b57d0}"
    ".idle,.waiting{color:#555}"
)
_LABELS = {"waiting": "waiting for the client"}


def server_page(server: BrowserServer, openapi: dict[str, Any]) -> str:
    """Sessions and paths of a browser server. Needs no token, so it shows neither lease ids nor page addresses."""
    leases = [server.describe_lease(lease) for lease in server.leases.active()]
    rows = [
        (
            str(number), (state.state, _LABELS.get(state.state, state.state)), state.owner,
            "" if state.task is None else f"{state.task.source}/{state.task.environment}", str(state.steps),
            state.outcome or "", f"{state.seconds_left:.0f} s",
        )
        for number, state in enumerate(leases, 1)
    ]  # fmt: skip
    heads = ("session", "state", "owner", "task", "steps", "failure", "expires in")
    text = f"{len(leases)} of {server.leases.capacity} sessions leased. Clients reach this server at {server.url}."
    return html_document("Browser server", text, heads, rows, openapi)


def router_page(router: Router, openapi: dict[str, Any]) -> str:
    """Servers and paths of a router."""
    state = router.state()
    rows = [
        (
            server.url, ("alive", "alive") if server.alive else ("gone", "dead"), str(server.sessions),
            str(server.free), str(len(server.leases)), f"{server.heartbeat_age_seconds:.1f} s ago",
        )
        for server in state.servers
    ]  # fmt: skip
    text = f"{state.free} of {state.sessions} sessions free on {sum(server.alive for server in state.servers)} servers."
    return html_document(
        "Browser router", text, ("server", "", "sessions", "free", "leases", "last heartbeat"), rows, openapi
    )


TableCell = str | tuple[str, str]  # a text, or a CSS class and a text


def html_document(
    title: str, text: str, heads: Sequence[str], rows: Iterable[Sequence[TableCell]], openapi: dict[str, Any]
) -> str:
    """A page with a status table and a table of the API paths."""
    return (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1><p>{escape(text)}</p>"
        f"{_table(heads, rows)}<h2>Paths</h2><p>{escape(openapi['info'].get('description', ''))} "
        '<a href="/openapi.json">openapi.json</a>, <a href="/metrics">metrics</a>, <a href="/healthz">health</a></p>'
        f"{_table(('', 'path', '', 'answers'), _paths(openapi))}</html>"
    )


def _paths(openapi: dict[str, Any]) -> list[Sequence[TableCell]]:
    return [
        (method.upper(), path, operation.get("description", ""), ", ".join(operation["responses"]))
        for path, operations in openapi["paths"].items()
        for method, operation in operations.items()
    ]


def _table(heads: Sequence[str], rows: Iterable[Sequence[TableCell]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(cell: TableCell) -> str:
    kind, text = cell if isinstance(cell, tuple) else ("", cell)
    return f'<td class="{kind}">{escape(text)}</td>' if kind else f"<td>{escape(text)}</td>"
