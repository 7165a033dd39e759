"""Messages between the processes of one machine through shared memory, instead of sockets.

Each sender has a pipe to each receiver: an anonymous file in memory, which ends with the processes that have it open.
It is small enough to stay in the processor's cache, so that a message is read from memory once and written once.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

PIPE_BYTES = 2 * 2**20
_WRITTEN, _READ, _CLOSED, _TOKEN = 0, 8, 16, 24  # places of int64 in the header, each in a cache line of its own
_HEADER_BYTES = mmap.PAGESIZE
_PEER_CHECK_SECONDS = 0.1


class Pipe:
    """A ring of bytes between two processes, one of which writes. Either may close it."""

    def __init__(self, file: int, token: int) -> None:
        """Of the descriptor of a file, which is not needed afterwards. Raises OSError for that of another pipe."""
        memory = mmap.mmap(file, _HEADER_BYTES + PIPE_BYTES)
        self.header = np.frombuffer(memory, np.int64, _HEADER_BYTES // 8)
        if self.header[_TOKEN] != token:
            raise OSError("the file is that of another process")
        self._data = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES)
        self._fence = threading.Lock()

    @classmethod
    def create(cls) -> tuple[Pipe, int, int]:
        """A new pipe, its file and its token. Raises OSError."""
        file, token = os.memfd_create("webrl-weights"), secrets.randbits(62)
        os.truncate(file, _HEADER_BYTES + PIPE_BYTES)
        os.pwrite(file, token.to_bytes(8, sys.byteorder), 8 * _TOKEN)
        return cls(file, token), file, token

    @classmethod
    def open(cls, process: int, file: int, token: int) -> Pipe:
        """The pipe that another process has created. Raises OSError, also where it is in another container."""
        own = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        try:
            return cls(own, token)
        except ValueError as error:  # a shorter file
            raise OSError(str(error)) from error
        finally:
            os.close(own)

    @property
    def closed(self) -> bool:
        return bool(self.header[_CLOSED])

    def close(self) -> None:
        self.header[_CLOSED] = 1

    def write(self, source: torch.Tensor) -> int:
        """Write as much of flat bytes as there is room for; returns their number."""
        place, size = self._room(PIPE_BYTES - int(self.header[_WRITTEN] - self.header[_READ]), _WRITTEN, source)
        self._data[place : place + size].copy_(source[:size])
        return self._move(_WRITTEN, size)

    def read(self, target: torch.Tensor) -> int:
        """Read as many flat bytes as there are; returns their number."""
        place, size = self._room(int(self.header[_WRITTEN] - self.header[_READ]), _READ, target)
        target[:size].copy_(self._data[place : place + size])
        return self._move(_READ, size)

    def _room(self, size: int, counter: int, data: torch.Tensor) -> tuple[int, int]:
        place = int(self.header[counter]) % PIPE_BYTES
        return place, min(size, PIPE_BYTES - place, data.numel())

    def _move(self, counter: int, size: int) -> int:
        with self._fence:  # processors other than x86 may reorder the bytes with the counter
            pass
        with self._fence:
            self.header[counter] += size
        return size


@dataclass
class _Message:
    data: torch.Tensor  # flat bytes
    peer: int
    moved: int = 0


class SharedMemoryChannel:
    """Messages in flight on a link within one machine, in order for each pair of ranks. They move when it is polled."""

    poll_seconds = 0.0001  # between polls

    def __init__(self, pipes: Mapping[int, Pipe], processes: Mapping[int, int], sends: bool) -> None:
        """`pipes`, `processes`: to each peer, and its process id. Raises OSError for a process that has ended."""
        self._pipes, self._move = pipes, Pipe.write if sends else Pipe.read
        self._process_files = {peer: os.pidfd_open(processes[peer]) for peer in pipes}
        self._messages: deque[_Message] = deque()
        self._of_peer: defaultdict[int, deque[_Message]] = defaultdict(deque)
        self._complete = 0
        self._peer_checked_at = 0.0

    def start_transfer(self, wakeup: threading.Event, seconds: float) -> None:
        """Start a transfer. Completions are polled and do not set `wakeup`."""
        self._complete = 0

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Send a contiguous tensor."""
        message = _Message(tensor.view(torch.uint8), peer)
        self._messages.append(message)
        self._of_peer[peer].append(message)

    receive = send  # into a contiguous tensor

    def completed(self) -> tuple[int, str | None]:
        """Number of completed operations of this transfer, in order, and the error of the next one."""
        for peer, waiting in self._of_peer.items():
            pipe = self._pipes[peer]
            while waiting and not pipe.closed and self._advance(waiting[0], pipe):
                waiting.popleft()
        while self._messages and self._messages[0].moved == self._messages[0].data.numel():
            self._messages.popleft()
            self._complete += 1
        return self._complete, self._lost_peer()

    def close(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        for file in self._process_files.values():
            os.close(file)
        self._process_files.clear()
        self._messages.clear()
        self._of_peer.clear()

    def _advance(self, message: _Message, pipe: Pipe) -> bool:
        """Move what can be moved of a message; whether that is all."""
        while message.moved < message.data.numel():
            moved = self._move(pipe, message.data[message.moved :])
            if not moved:
                return False
            message.moved += moved
        return True

    def _lost_peer(self) -> str | None:
        """Whether the peer of the next message has closed the link or, looked up now and then, has ended."""
        if not self._messages:
            return None
        peer, now = self._messages[0].peer, time.monotonic()
        if self._pipes[peer].closed:
            return "the connection was closed"
        if now < self._peer_checked_at + _PEER_CHECK_SECONDS:
            return None
        self._peer_checked_at = now
        ended = select.poll()  # unlike select it knows descriptors of 1024 and more
        ended.register(self._process_files[peer], select.POLLIN)
        return "the process has ended" if ended.poll(0) else None
