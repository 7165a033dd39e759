"""Faults of an endpoint, drawn reproducibly: by seed, request, and how often this request has come."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

FAULTS = (
    "rate_limited",  # status 429 with Retry-After
    "server_error",  # status 500
    "dropped",  # the connection closes without a response
    "hang",  # no response
    "slow",  # a right response after ten times the latency
    "truncated",  # finish_reason length, and the wrong decision in what there is
    "invalid_json",  # a body that is not JSON
    "broken_reply",  # a reply that is not quite of the asked form, with the wrong decision and finish_reason stop
    "no_choices",  # a body without a reply
    "wrong_schema",  # a reply of another form, with the wrong decision
    "contradictory",  # a reply with both decisions
    "empty",
    "refusal",
)
TRANSPORT = ("rate_limited", "server_error", "dropped", "hang", "slow")
"""Faults for which a client needs no further attempt at the question."""


def parse_faults(text: str) -> dict[str, float]:
    """Rates from `0.3` (shared equally by all faults) or `truncated=0.1,hang=0.05`. Raises ValueError."""
    try:
        if "=" not in text:
            return _checked(dict.fromkeys(FAULTS, float(text or 0) / len(FAULTS)))
        return _checked({name: float(rate) for name, _, rate in (part.partition("=") for part in text.split(","))})
    except ValueError as error:
        raise ValueError(f"--faults={text}: {error}; kinds: {', '.join(FAULTS)}") from error


def _checked(rates: dict[str, float]) -> dict[str, float]:
    unknown = sorted(set(rates) - set(FAULTS))
    if unknown:
        raise ValueError(f"unknown kind {unknown[0]}")
    if not all(0 <= rate <= 1 for rate in rates.values()) or sum(rates.values()) > 1 + 1e-9:
        raise ValueError("rates are of 0 to 1, and at most 1 together")
    return rates


@dataclass
class FaultPlan:
    """Draws the fault of each request, and counts them."""

    rates: Mapping[str, float]
    seed: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    _seen: Counter[str] = field(default_factory=Counter)

    def draw(self, digest: str) -> str | None:
        """The fault of the request with this digest; None for a right response."""
        self._seen[digest] += 1
        source = f"{self.seed}/{digest}/{self._seen[digest]}".encode()
        number = int.from_bytes(hashlib.sha256(source).digest()[:8]) / 2**64
        for fault in FAULTS:
            number -= self.rates.get(fault, 0.0)
            if number < 0:
                self.counts[fault] += 1
                return fault
        return None
