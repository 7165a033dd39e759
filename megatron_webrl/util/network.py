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
import threading
from pathlib import Path
from typing import Any

LOOKUP_SECONDS = 10.0
MAX_LOOKUPS = 32  # different ones at a time; one that is given up counts until its thread ends
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


class _Lookups:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._running: dict[tuple[Any, ...], asyncio.Future[list[Any]]] = {}

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        """As socket.getaddrinfo. Equal lookups share a thread. Raises socket.gaierror, after LOOKUP_SECONDS as well."""
        key = host, port, family, type, proto, flags
        if (found := self._running.get(key)) is None:
            if len(self._running) >= MAX_LOOKUPS:
                raise socket.gaierror(socket.EAI_AGAIN, f"{MAX_LOOKUPS} other lookups of names do not end")
            found = self._running[key] = self._loop.create_future()
            found.add_done_callback(lambda future: future.cancelled() or future.exception())  # may have no reader left
            threading.Thread(target=self._look_up, args=(key, found), name="name lookup", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.shield(found), LOOKUP_SECONDS)
        except TimeoutError:
            text = f"the lookup of {host} did not end within {LOOKUP_SECONDS:g} s"
            raise socket.gaierror(socket.EAI_AGAIN, text) from None

    def _look_up(self, key: tuple[Any, ...], found: asyncio.Future[list[Any]]) -> None:
        try:
            result: list[Any] | Exception = socket.getaddrinfo(*key)
        except Exception as error:
            result = error
        try:
            self._loop.call_soon_threadsafe(self._finish, key, found, result)
        except RuntimeError:  # the loop is closed: nobody waits
            return

    def _finish(self, key: tuple[Any, ...], found: asyncio.Future[list[Any]], result: list[Any] | Exception) -> None:
        del self._running[key]
        if isinstance(result, Exception):
            found.set_exception(result)
        else:
            found.set_result(result)


def use_own_threads() -> None:
    """Let the running event loop look up names in threads of their own. A second call does nothing."""
    loop = asyncio.get_running_loop()
    if not isinstance(getattr(loop.getaddrinfo, "__self__", None), _Lookups):
        loop.getaddrinfo = _Lookups(loop).getaddrinfo  # type: ignore[method-assign]
