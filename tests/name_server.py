"""A name server that never answers, for the processes of a mount namespace."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "mlflow.black-hole.test"  # of no host


def why_no_namespace() -> str:
    """Why this user cannot have a mount namespace; empty if it can."""
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


@contextmanager
def silent_name_server(folder: Path) -> Iterator[list[str]]:
    """The server; yields what a command is preceded by to use it: a lookup takes two minutes, and fails."""
    file, address = folder / "resolv.conf", f"127.53.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
    file.write_text(f"nameserver {address}\noptions timeout:30 attempts:4\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((address, 53))
        yield ["unshare", "--mount", "sh", "-c", f'mount --bind {file} /etc/resolv.conf && exec "$@"', "sh"]
