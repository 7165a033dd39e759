"""Claim items of a queue of the control service in the background: tickets, or episodes of an evaluation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megatron_webrl.control.client import ControlClient

CLAIM_SECONDS = 1.0  # for which a claim waits at the service


class Claimer:
    """Claims items of one queue, so that neither a wait nor an outage holds up the caller. Methods never wait.

    They raise JobFailed without a control service.
    """

    def __init__(self, control: ControlClient, queue: str, owner: str, sharers: int = 1) -> None:
        """`owner`: the name that claims; `sharers`: the number of claimers that share free items."""
        self._control, self._queue, self._owner, self._sharers = control, queue, owner, sharers
        self._thread: threading.Thread | None = None
        self._claimed: list[Any] = []
        self._error: Exception | None = None

    def poll(self, room: int) -> list[Any]:
        """Items claimed since the last call, as `ControlClient.claim` returns them; then claims more, up to `room`."""
        if self._is_busy():
            return []
        claimed, self._claimed = self._claimed, []
        if room > len(claimed):
            self._start(lambda: self._claim(room - len(claimed)))
        return claimed

    def put_back(self) -> None:
        """Let others claim the items of the last claim: the caller cannot use them now. Call this until it can."""
        if not self._is_busy() and self._claimed:
            items, self._claimed = [item for item, *_ in self._claimed], []
            self._start(lambda: self._control.run("give_back", self._queue, self._owner, items))

    def _claim(self, count: int) -> None:
        self._claimed = self._control.claim(self._queue, self._owner, count, self._sharers, CLAIM_SECONDS)

    def _is_busy(self) -> bool:
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._error is not None:
            raise self._error
        return False

    def _start(self, request: Callable[[], object]) -> None:
        def run() -> None:
            try:
                request()
            except Exception as error:  # raised by the next call
                self._error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
