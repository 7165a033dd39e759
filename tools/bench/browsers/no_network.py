"""What a network namespace has."""

from __future__ import annotations

import errno
import socket

OUTSIDE = ("192.0.2.1", 9)  # an address that is reserved for documentation


def interfaces() -> list[str]:
    """The network interfaces of this process."""
    return [name for _, name in socket.if_nameindex()]


def has_route() -> bool:
    """Whether this process could send anything to another machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(OUTSIDE)  # sends nothing: it only asks for a route
        except OSError as error:
            if error.errno != errno.ENETUNREACH:
                raise
            return False
    return True
