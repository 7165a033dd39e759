"""Aligned 8-byte words of a shared mapping, loaded with acquire and stored with release order.

A commit word publishes all earlier writes. On Arm a plain store does not; libatomic's functions order the accesses.
On x86-64 plain aligned 8-byte accesses already have acquire and release order, so libatomic is optional there.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable
from typing import NoReturn

from megatron_webrl.ring.errors import RingError

ACQUIRE, RELEASE = 2, 3  # __ATOMIC_ACQUIRE and __ATOMIC_RELEASE of the C ABI
TSO_MACHINES = frozenset({"x86_64", "AMD64"})

Load = Callable[[int], int]
Store = Callable[[int, int], None]


def load_libatomic() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libatomic.so.1")
    except OSError:
        return None


def accessors(machine: str, atomic: ctypes.CDLL | None) -> tuple[Load, Store]:
    """Functions (address) -> value and (address, value) for this machine. Raises RingError where none is safe."""
    if atomic is not None:
        load_8, store_8 = getattr(atomic, "__atomic_load_8"), getattr(atomic, "__atomic_store_8")
        load_8.argtypes, load_8.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_uint64
        store_8.argtypes, store_8.restype = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int), None
        return lambda address: load_8(address, ACQUIRE), lambda address, value: store_8(address, value, RELEASE)
    if machine not in TSO_MACHINES:
        raise RingError(
            f"machine {machine} does not order plain memory accesses and libatomic.so.1 is missing; "
            "install it (Debian: libatomic1)"
        )
    word = ctypes.c_uint64.from_address

    def store(address: int, value: int) -> None:
        word(address).value = value

    return lambda address: word(address).value, store


class AtomicWords:
    """The 8-byte words of a mapping by byte offset; offsets must be multiples of 8."""

    load: Callable[[int], int]  # offset -> the word, with acquire order
    store: Callable[[int, int], None]  # write the word at an offset, with release order

    def __init__(self, mapping: mmap.mmap) -> None:
        load, store = accessors(platform.machine(), load_libatomic())
        # The temporary object must not outlive this line: it would keep the mapping from being closed.
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self.load = lambda offset: load(base + offset)
        self.store = lambda offset, value: store(base + offset, value)

    def invalidate(self) -> None:
        """Refuse every later access: an access to an unmapped address would crash the process."""
        self.load = self.store = _closed


def _closed(*_: int) -> NoReturn:
    raise RingError("the ring is closed; attach again")
