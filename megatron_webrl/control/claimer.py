"""Claims in the background."""

from __future__ import annotations

import threading
from typing import Any

from megatron_webrl.control.client import ControlClient

CLAIM_SECONDS = 1.0  # for which a claim waits at the service


class Claimer:
    """Claims slots of one counter in the background, so that neither a wait nor an outage holds up the caller."""

    def __init__(self, control: ControlClient, counter: str, owner: str, sharers: int = 1) -> None:
        """`owner`: the name that claims; `sharers`: the number of claimers that share free slots."""
        self._control, self._counter, self._owner, self._sharers = control, counter, owner, sharers
        self._thread: threading.Thread | None = None
        self._claimed: list[Any] = []
        self._error: Exception | None = None

    def poll(self, room: int) -> list[Any]:
        """Slots claimed since the last call, as `ControlClient.claim` returns them; then claims more, up to `room`.

        Never waits. Raises JobFailed without a control service.
        """
        if self._thread is not None and self._thread.is_alive():
            return []
        if self._error is not None:
            raise self._error
        claimed, self._claimed = self._claimed, []
        if room > len(claimed):
            self._thread = threading.Thread(target=self._claim, args=(room - len(claimed),), daemon=True)
            self._thread.start()
        return claimed

    def _claim(self, count: int) -> None:
        try:
            self._claimed = self._control.claim(
                self._counter, self._owner, count, self._sharers, wait_seconds=CLAIM_SECONDS
            )
        except Exception as error:  # raised by the next `poll`
            self._error = error
