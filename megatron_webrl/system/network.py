"""Addresses of this machine."""

from __future__ import annotations

import socket


def own_address(host: str, port: int, family: int = socket.AF_UNSPEC) -> str:
    """The address by which this machine reaches host:port; no packet is sent. Raises OSError."""
    family, kind, _, _, peer = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)
        return str(probe.getsockname()[0])
