"""Stores of process groups: each group has a TCPStore of its own, which lives as long as the group.

torch's NCCL groups share keys with every group on the same TCPStore, whatever its prefix: after a failure a watchdog
sets `exception_dump`, and each process that reads this key dumps its state and terminates. Therefore each attempt of
the trainer and each link forms its groups over a fresh store, whose address travels through the control service.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from megatron_webrl.util.network import own_address


def host_group_store(control_host: str, control_port: int, timeout_seconds: float) -> tuple[TCPStore, dict[str, Any]]:
    """Host a store on a free port; returns it and its address, as `connect_group_store` takes it.

    It listens on the address by which this machine reaches the control service, until its last reference is dropped.
    `timeout_seconds` limits operations of this rank. Raises OSError, and RuntimeError if the store does not start.
    """
    address = own_address(control_host, control_port, socket.AF_INET)  # the control service listens on IPv4 only
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=timeout_seconds)
    # The store owns the descriptor and closes it.
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )
    return store, {"host": address, "port": port}


def connect_group_store(address: dict[str, Any], timeout_seconds: float) -> TCPStore:
    """Connect to a hosted store. `timeout_seconds` limits this and each operation.

    Raises RuntimeError without a connection. A host that is stopped or unreachable after it has accepted is not
    detected: torch then waits for ever.
    """
    limit = timedelta(seconds=timeout_seconds)
    return TCPStore(address["host"], address["port"], is_master=False, wait_for_workers=False, timeout=limit)
