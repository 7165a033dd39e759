"""Take this process into a network namespace that has a loopback interface and nothing else."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

OUTSIDE = ("192.0.2.1", 9)  # an address that is reserved for documentation
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def leave_network() -> None:
    """Enter the namespace; this process must have one thread. Raises OSError where the system does not permit it."""
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
