"""Answers of the pages, JSON and screenshots. No browser keeps any: runs have the same addresses."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from megatron_webrl.control.http.json_bodies import encoded
from megatron_webrl.util.image_type import image_type


def json_response(content: Any, status: int = 200) -> Response:
    return Response(encoded(content), status, {"cache-control": "no-store"}, "application/json")


def image_response(image: bytes | memoryview) -> Response:
    data = bytes(image)
    headers = {"cache-control": "no-store"}
    return Response(data, media_type=image_type(data) or "application/octet-stream", headers=headers)
