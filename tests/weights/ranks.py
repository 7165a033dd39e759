"""What the other ranks of a transfer do in their own processes."""

from __future__ import annotations

import hashlib
import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_webrl.weights import transport
from megatron_webrl.weights.manifest import Manifest


def tensors_of(manifest: Manifest, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors as the manifest describes them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        entry.name: torch.randn(entry.shape, generator=generator).to(getattr(torch, entry.dtype))
        for entry in manifest.entries
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A digest of names, types, shapes and values."""
    state = hashlib.sha256()
    for name, tensor in tensors.items():
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        state.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def rank_process(
    results: Any,
    port: int,
    rank: int,
    size: int,
    manifest: str,
    bucket: int,
    seconds: float,
    die_after: int | None,
    transfers: int,
) -> None:
    """Join, receive `transfers` times, report a digest or an error; die by SIGKILL after `die_after` tensors."""
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=30))
        group = transport.join(store, "test", rank, size, seconds, "gloo")
        for _ in range(transfers):
            received = {}
            for name, tensor in transport.receive(group, Manifest.from_json(manifest), bucket, "cpu"):
                received[name] = tensor
                if die_after is not None and len(received) > die_after:
                    os.kill(os.getpid(), signal.SIGKILL)
            results.put((rank, digest(received)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}"))
