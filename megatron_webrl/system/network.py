"""Addresses of this machine."""

from __future__ import annotations

import ipaddress
import socket


def own_address(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """The address by which this machine reaches host:port; no packet is sent. Raises OSError."""
    family, kind, _, _, peer = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback, without resolving it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
