"""The HTTP server of pages."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from megatron_webrl.tasks.server import LocalServer, PageResponse


def test_a_closed_server_is_not_started() -> None:
    server = LocalServer(lambda request: PageResponse(200), "pages")
    server.close()
    with pytest.raises(RuntimeError, match="pages was closed"):
        _ = server.address


def test_a_closed_server_keeps_its_address_and_answers_nothing() -> None:
    server = LocalServer(lambda request: PageResponse(200), "pages")
    address = server.address
    with urllib.request.urlopen(f"http://{address}/", timeout=5) as answer:
        assert answer.status == 200
    server.close()
    server.close()
    assert server.address == address
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{address}/", timeout=5)
