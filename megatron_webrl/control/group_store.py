"""Stores of process groups: each group has a TCPStore of its own, which lives as long as the group.

torch's NCCL groups share keys with every group on the same TCPStore, whatever its prefix: after a failure a watchdog
sets `exception_dump`, and each process that reads this key dumps its state and terminates. Therefore no group is formed
over the control plane's store, which outlives all of them; that store only carries the address of a group's own store.
"""

from __future__ import annotations

import json
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from megatron_webrl.system.network import own_address


def host_group_store(control: TCPStore, key: str, timeout_seconds: float) -> TCPStore:
    """Host a store on a free port and publish its address as `key` of the control plane's store.

    It listens on the address by which this machine reaches the control plane, until its last reference is dropped.
    `timeout_seconds` limits operations of this rank. Raises OSError, and RuntimeError if the store does not start.
    """
    address = own_address(control.host, control.port, socket.AF_INET)  # the control plane listens on IPv4 only
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    limit = timedelta(seconds=timeout_seconds)
    # The store owns the descriptor and closes it.
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )
    control.set(key, json.dumps({"host": address, "port": port}))
    return store


def connect_group_store(control: TCPStore, key: str, timeout_seconds: float) -> TCPStore:
    """Connect to the store published as `key`, which must be set. `timeout_seconds` limits this and each operation.

    Raises RuntimeError without a connection. A host that is stopped or unreachable after it has accepted is not
    detected: torch then waits for ever.
    """
    address = json.loads(control.get(key))
    limit = timedelta(seconds=timeout_seconds)
    return TCPStore(address["host"], address["port"], is_master=False, wait_for_workers=False, timeout=limit)
