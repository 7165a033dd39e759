"""Weight transfer over links: a trainer rank sends to all its engines at once, an engine rank receives its slices.

A link's messages are processed in order, several in flight: packing and unpacking overlap with sending. Contiguous
data of the transfer's dtype are not copied, so large slices are sent alone; other data pass through staging buffers.

A failing rank publishes its error in the link's store and closes the link, so the other ranks fail at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from megatron_webrl.weights.checksums import checksum
from megatron_webrl.weights.link import TransferError, TransferLink, error_summary, join_link, reject_link
from megatron_webrl.weights.link_transfer import (
    LinkReceiver,
    LinkSender,
    OutgoingMessages,
    TransferAborted,
    WeightTarget,
    split_into_units,
)
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
    """Send over all links at once; a failed link does not delay the others.

    Slices are sent as `dtype`; staging buffers take at most `staging_bytes` over all links. `transfer` increases from
    call to call. `timeout_seconds` limits each wait for a peer; `peer_failure(link name)` may report a dead peer
    earlier. The first messages are packed before the receivers are ready. With `verify` receivers compare checksums.

    Returns the error of each link by name, None for success; a failed link is closed. After the return nothing reads
    the source. Raises ValueError for messages that do not fit, and exceptions of `source` (all links are closed then),
    but not for a peer's failure.
    """
    units = split_into_units([one.messages for one in transfers], dtype, staging_bytes)
    wakeup = threading.Event()
    senders = [
        LinkSender(one, of, source, dtype, transfer, timeout_seconds, wakeup, peer_failure, verify)
        for one, of in zip(transfers, units, strict=True)
    ]
    try:
        for sender in senders:  # before the first packing, which may take time or fail
            sender.run_guarded(sender.announce)
        while waiting := [sender for sender in senders if not sender.finished]:
            wakeup.clear()
            progress = [sender.run_guarded(sender.poll) for sender in waiting]
            if not any(progress):
                wakeup.wait(min(sender.seconds_to_next_poll() for sender in waiting))
    except BaseException as error:
        for sender in senders:
            if not sender.finished:
                sender.link.fail(f"transfer {transfer}: {type(error).__name__}: {error_summary(error)}")
        raise
    return {sender.link.name: sender.failure for sender in senders}


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
    """Receive this rank's messages of a link, in link order, into `target`.

    `timeout_seconds` limits each wait for a peer. With `verify` slices are read back and their checksums compared.
    Raises ValueError for messages that do not fit, and TransferError for other errors; the link is closed then.
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
