"""Recordings that a test writes itself."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.browser.egress.har import FORMAT, HAR_MEMBER, VISIT_MEMBER, visit_path
from megatron_webrl.types import Task

TASK = Task(id="web/test", source="web", environment="page", seed=0, max_steps=5, url="http://a.test/")
CLOCK_MS = 1_600_000_000_000


@dataclass(frozen=True)
class Recorded:
    """A request of a visit and its response; `content` None: the body was lost."""

    url: str
    content: bytes | None = b""
    status: int = 200
    method: str = "GET"
    headers: tuple[tuple[str, str], ...] = ()
    posted: bytes | None = None
    posted_type: str = "application/octet-stream"
    request_headers: dict[str, str] = field(default_factory=dict)
    failure: str | None = None
    from_cache: bool = False  # of the browser


def write_visit(folder: Path, visit: int, *exchanges: Recorded, clock_ms: int = CLOCK_MS) -> Path:
    """Write a visit of TASK as a recorder does."""
    path = visit_path(folder, TASK, visit)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(VISIT_MEMBER, json.dumps({"format": FORMAT, "task": TASK.id, "clock_ms": clock_ms}))
        entries = [_entry(file, exchange) for exchange in exchanges]
        file.writestr(HAR_MEMBER, json.dumps({"log": {"entries": entries}}))
    return path


def _entry(file: zipfile.ZipFile, exchange: Recorded) -> dict[str, object]:
    sent = {} if exchange.from_cache or exchange.status <= 0 else {"Host": "a.test"}
    request: dict[str, object] = {
        "method": exchange.method, "url": exchange.url,
        "headers": [{"name": name, "value": value} for name, value in {**sent, **exchange.request_headers}.items()],
    }  # fmt: skip
    if exchange.posted is not None:
        request["postData"] = {"mimeType": exchange.posted_type, "_file": _store(file, exchange.posted)}
    content = {} if exchange.content is None else {"_file": _store(file, exchange.content)}
    response: dict[str, object] = {
        "status": exchange.status, "statusText": "OK", "content": content,
        "headers": [{"name": name, "value": value} for name, value in exchange.headers],
    }  # fmt: skip
    if exchange.failure is not None:
        response["_failureText"] = exchange.failure
    return {"request": request, "response": response}


def _store(file: zipfile.ZipFile, content: bytes) -> str:
    name = f"{hashlib.sha1(content).hexdigest()}.dat"
    if name not in file.namelist():
        file.writestr(name, content)
    return name
