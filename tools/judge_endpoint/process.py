"""Run the endpoint as a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0


@contextmanager
def endpoint_process(folder: Path, *options: str) -> Iterator[str]:
    """The URL of an endpoint, for judge.verdict.url, that runs until the end of the block. `options`: command line.

    `folder` receives its address file. Raises RuntimeError if it does not start.
    """
    address = folder / "endpoint.json"
    address.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tools.judge_endpoint", "--address-file", str(address.absolute()), *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not address.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the endpoint did not start: {' '.join(command)}")
            time.sleep(0.02)
        yield json.loads(address.read_text())["url"]
    finally:
        process.kill()
        process.wait()


def stats_of(url: str) -> dict[str, Any]:
    """What the endpoint counted."""
    with urlopen(url.removesuffix("/v1") + "/stats", timeout=10) as reply:
        return json.load(reply)
