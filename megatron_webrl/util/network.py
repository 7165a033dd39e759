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
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
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


class NetworkNamespace:
    """A network of its own, with a loopback interface and nothing else.

    It belongs to a thread of this process, whose sockets are in it; other processes enter it by `path`.
    """

    def __init__(self, name: str) -> None:
        """`name` of the thread. Raises OSError where the system does not permit it."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        try:
            self.path: str = self._thread.submit(_enter_namespace).result()  # its file in /proc
        except OSError:
            self.close()
            raise

    def listen(self) -> socket.socket:
        """A socket that listens at a loopback address of this network."""
        return self._thread.submit(socket.create_server, ("127.0.0.1", 0)).result()

    def connect(self, port: int) -> socket.socket:
        """A connection to a loopback port of this network. Raises OSError."""
        return self._thread.submit(socket.create_connection, ("127.0.0.1", port), LOOKUP_SECONDS).result()

    def close(self) -> None:
        """Leave the namespace, which ends with its last process and socket."""
        self._thread.shutdown()


def listen(network: NetworkNamespace | None = None) -> socket.socket:
    """A socket that listens at a loopback address of a network; None: this machine's."""
    return socket.create_server(("127.0.0.1", 0)) if network is None else network.listen()


def _enter_namespace() -> str:
    leave_network()
    return f"/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"


async def start_relay(
    listener: socket.socket, connect: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]
) -> asyncio.Server:
    """Relay every connection to `listener` to one that `connect` opens, until either end closes."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(2**16):
            writer.write(piece)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers, pumps = [writer], list[asyncio.Task[None]]()
        try:
            far_reader, far_writer = await connect()
            writers.append(far_writer)
            pumps = [asyncio.create_task(pump(reader, far_writer)), asyncio.create_task(pump(far_reader, writer))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # the other side is gone
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for each in writers:
                each.transport.abort()

    return await asyncio.start_server(serve, sock=listener)


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
