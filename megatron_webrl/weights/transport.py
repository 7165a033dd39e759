"""Weights over links: a trainer rank sends to all its engines at once, an engine rank receives what it holds.

Each side works through its own messages of a link in the link's order, a few of them under way: while one is on the
wire the next is packed, or the last unpacked. What is contiguous and of the wire's type on its side travels without
a copy there, to which end large slices leave their message and travel alone; everything else goes through staging
buffers that the link keeps.

A rank that fails says why in the link's store and closes the link, so that the others fail at once and not only at
their limit, and can tell who was first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import TransferError, TransferLink, error_summary, join_link, reject_link
from megatron_webrl.weights.link_receiver import LinkReceiver, WeightTarget
from megatron_webrl.weights.link_sender import LinkSender, OutgoingMessages
from megatron_webrl.weights.link_transfer import TransferAborted, split_into_units
from megatron_webrl.weights.slices import TransferMessage

__all__ = [
    "OutgoingMessages",
    "TransferError",
    "TransferLink",
    "WeightTarget",
    "checksum",
    "join_link",
    "receive",
    "reject_link",
    "send",
]


def send(
    transfers: Sequence[OutgoingMessages],
    source: Callable[[str], torch.Tensor],
    dtype: torch.dtype,
    staging_bytes: int,
    transfer: int,
    timeout_seconds: float,
    peer_failure: Callable[[str], str | None] | None = None,
    verify: bool = False,
) -> dict[str, str | None]:
    """Send over all links at once; a link that fails holds back no other.

    The first messages are packed at once, before any receiver is there. Slices travel as `dtype`, staging buffers
    take at most `staging_bytes` over all links. `transfer` grows from call to call. `seconds` limits each wait for a
    peer; `watch(link name)` may say earlier that one is dead. With `verify` the receivers compare checksums of
    every slice.

    Returns for each link's name None, or why it failed; a failed link is closed. When this returns, nobody reads
    the source any more. Raises ValueError for messages that do not fit, and whatever `source` raises (all links
    are closed then); never for a peer's failure.
    """
    units = split_into_units([one.messages for one in transfers], dtype, staging_bytes)
    bell = threading.Event()
    runs = [
        LinkSender(one, of, source, dtype, transfer, timeout_seconds, bell, peer_failure, verify)
        for one, of in zip(transfers, units, strict=True)
    ]
    try:
        for run in runs:  # all of them before the first packing, which may take a while or fail
            run.run_guarded(run.announce)
        while waiting := [run for run in runs if not run.finished]:
            bell.clear()
            moved = [run.run_guarded(run.poll) for run in waiting]
            if not any(moved):
                bell.wait(min(run.seconds_to_next_poll() for run in waiting))
    except BaseException as error:
        for run in runs:
            if not run.finished:
                run.link.fail(f"transfer {transfer}: {type(error).__name__}: {error_summary(error)}")
        raise
    return {run.link.name: run.failure for run in runs}


def receive(
    link: TransferLink,
    messages: Sequence[TransferMessage],
    target: WeightTarget,
    dtype: torch.dtype,
    staging_bytes: int,
    transfer: int,
    timeout_seconds: float,
    verify: bool = False,
) -> None:
    """Receive this rank's messages of a link, in the link's order, into `target`.

    `seconds` limits each wait for a peer. With `verify` every slice is read back from the target before it is called
    written, and its checksum compared with the sender's at the end. Raises ValueError for messages that do not
    fit, and TransferError for everything else, an error of the target included; the link is closed then.
    """
    (units,) = split_into_units([messages], dtype, staging_bytes)
    if link.process_group is None:
        raise TransferError(f"link {link.name} cannot be used: {link.close_reason}")
    try:
        LinkReceiver(link, units, target, dtype, transfer, timeout_seconds, verify).run()
    except TransferAborted as error:
        raise link.fail(f"transfer {transfer}: {error}") from error
    except BaseException as error:
        failure = link.fail(f"transfer {transfer}: {type(error).__name__}: {error_summary(error)}")
        if isinstance(error, Exception):
            raise failure from error
        raise
