"""A read-only query of the control service of a running job."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_webrl.control.address import ControlAddress
from megatron_webrl.control.connection import Connection, ControlLost
from megatron_webrl.util.text import first_line

Answer = TypeVar("Answer")

CONNECT_SECONDS = 0.3  # limit for the host to accept the connection, which its kernel does for a busy service, too
QUERY_SECONDS = 2.0  # limit for an answer


@dataclass(frozen=True)
class TicketCounts:
    claimed: int  # slots
    limit: int
    in_progress: int  # claimed and not closed

    def __str__(self) -> str:
        return f"{self.in_progress} in progress, {self.claimed} started of {self.limit} allowed"


@dataclass(frozen=True)
class ControlStatus:
    outcome: str | None = None  # None while the job runs
    job_id: str = ""
    accepts_tickets: bool = False  # whether workers may claim tickets
    stop_requested: bool = False
    tickets: TicketCounts | None = None
    status_lines: dict[str, str] = field(default_factory=dict)  # by role
    heartbeat_ages: dict[str, float] = field(default_factory=dict)  # seconds by role
    instance_counts: dict[str, int] = field(default_factory=dict)  # by role
    journal_error: str | None = None  # why the service could not be started again

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ControlStatus:
        """The answer to GET /status of control/server.py."""
        tickets = content["tickets"]
        roles = {role: report for role, report in content["roles"].items() if not report["cleared"]}
        return cls(
            outcome=content["end"]["outcome"] if content["end"] else None,
            job_id=content["job_id"],
            accepts_tickets=tickets is not None,
            stop_requested=content["stop"] is not None,
            tickets=None if tickets is None else TicketCounts(**tickets),
            status_lines={role: report["status"] for role, report in roles.items() if report["status"]},
            heartbeat_ages={role: report["silent_seconds"] for role, report in roles.items()},
            instance_counts=content["instances"],
            journal_error=content["journal_error"],
        )


def query(path: Path, seconds: float = QUERY_SECONDS) -> ControlStatus | str:
    """The status of the job whose control service the file names, or the reason why it is unknown.

    A host that is gone is known after CONNECT_SECONDS, an ended service at once, one that hangs after `seconds`.
    """
    return _ask(path, seconds, lambda connection, limit: ControlStatus.from_json(connection.status(limit)))


def query_rollouts(path: Path, episodes: Sequence[str], seconds: float = QUERY_SECONDS) -> dict[str, Any] | str:
    """What each rollout of the job does, as GET /rollouts of control/server.py answers, or why it is unknown.

    `episodes`: those to be written to files, as "rollout-0/KEY".
    """
    return _ask(path, seconds, lambda connection, limit: connection.rollouts(episodes, limit))


def _ask(path: Path, seconds: float, request: Callable[[Connection, float], Answer]) -> Answer | str:
    address, connection = ControlAddress.read(path), Connection(path, "status")
    if address is None:
        return f"{path} cannot be read" if path.is_file() else "the job has not started"
    limit = CONNECT_SECONDS
    try:
        socket.create_connection((address.host, address.port), limit).close()
        limit = seconds
        return request(connection, limit)
    except (ControlLost, OSError, ValueError) as error:
        cause = error.__cause__ or error
        reason = f"no answer within {limit:g} s" if isinstance(cause, TimeoutError) else first_line(cause)
        return f"{address.host}:{address.port} does not respond ({getattr(cause, 'strerror', None) or reason})"
    finally:
        connection.close()
