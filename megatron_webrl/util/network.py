"""Addresses of this machine, a network without any other, and name lookups with limits.

A lookup blocks its thread for minutes if the name server does not answer. By default it would take one of the few
threads that `asyncio.to_thread` shares, until all other work of the process waits for the name server, its end as well.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Any

from megatron_webrl.util.concurrency import in_own_thread

LOOKUP_SECONDS = 10.0
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


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


def leave_network() -> None:
    """Take this thread into a network that has a loopback interface and nothing else.

    Unless it is root, the process must have one thread. Raises OSError where the system does not permit it.
    """
    user, group = os.geteuid(), os.getegid()
    flags = _CLONE_NEWNET if user == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, f"no network namespace: {os.strerror(number)}")
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))


def use_own_threads() -> None:
    """Let the running event loop look up names in threads of their own. A second call does nothing."""
    asyncio.get_running_loop().getaddrinfo = _getaddrinfo  # type: ignore[method-assign]


async def _getaddrinfo(
    host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
) -> list[Any]:
    """As socket.getaddrinfo. Raises socket.gaierror, after LOOKUP_SECONDS as well."""
    lookup = in_own_thread("name lookup", socket.getaddrinfo, host, port, family, type, proto, flags)
    try:
        return await asyncio.wait_for(lookup, LOOKUP_SECONDS)
    except TimeoutError:
        text = f"the lookup of {host} did not end within {LOOKUP_SECONDS:g} s"
        raise socket.gaierror(socket.EAI_AGAIN, text) from None
