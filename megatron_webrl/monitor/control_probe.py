"""A read-only query of the control service of a running job."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_webrl.control.connection import Connection, ControlAddress, ControlLost
from megatron_webrl.util.text import first_line

QUERY_SECONDS = 2.0  # limit for an answer
Answer = dict[str, Any]


def query(
    path: Path,
    seconds: float = QUERY_SECONDS,
    request: Callable[[Connection, float], Answer] = Connection.status,
) -> Answer | str:
    """What the control service that the file names answers, or why nothing.

    An ended service is known at once, a host that is gone or a service that hangs after `seconds`.
    """
    address, connection = ControlAddress.read(path), Connection(path, "status")
    if address is None:
        return f"{path} cannot be read" if path.is_file() else "the job has not started"
    try:
        socket.create_connection((address.host, address.port), seconds).close()  # `request` would try again
        return request(connection, seconds)
    except (ControlLost, OSError, ValueError) as error:
        cause = error.__cause__ or error
        reason = f"no answer within {seconds:g} s" if isinstance(cause, TimeoutError) else first_line(cause)
        return f"{address.host}:{address.port} does not respond ({getattr(cause, 'strerror', None) or reason})"
    finally:
        connection.close()


def describe_tickets(tickets: Mapping[str, int] | None) -> str:
    """The ticket counter of an answer in words; empty before the first ticket may be claimed."""
    if tickets is None:
        return ""
    return f"{tickets['in_progress']} in progress, {tickets['claimed']} started of {tickets['limit']} allowed"
