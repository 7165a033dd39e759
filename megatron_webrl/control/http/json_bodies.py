"""JSON bodies of HTTP responses."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Send


def encoded(content: Any) -> bytes:
    """ASCII: lone surrogates survive."""
    return json.dumps(content).encode()


async def send_json(send: Send, status: int, body: bytes) -> None:
    """Send a response with a JSON body."""
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
