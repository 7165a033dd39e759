"""Routed experts of an engine's requests, collected from its steps; also of tokens that its prefix cache supplies.

The experts of a token are kept for its request, and for its place in the KV cache: a later request that finds the
token's keys and values there did not compute the token, and gets the experts of the request that did.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

RECORD_OPTION = "webrl_record_experts"
"""Of vLLM's additional_config: an engine records its routed experts, "auto": if it can, or "on"."""


@dataclass(frozen=True)
class ScheduledTokens:
    """Consecutive tokens of a request that one step computes."""

    start: int  # position of the first in the request
    first_block: int  # number of the request's block in `blocks[0]`
    blocks: Sequence[int]  # KV-cache blocks up to that of the last token; from the request's first on if it `begins`
    begins: bool  # the request, or again after a preemption: the tokens before are in the KV cache


@dataclass
class ExpertStore:
    """Experts, uint8 or uint16 [tokens, MoE layers, top_k], by request and by KV-cache block.

    A token that is computed again, after a weight update or for lack of memory, has its last experts: with them the
    engine computed the keys and values that later tokens see.
    """

    num_blocks: int
    block_size: int  # tokens
    _cached: np.ndarray | None = None  # [blocks * block size, MoE layers, top_k]
    _requests: dict[str, list[tuple[int, np.ndarray]]] = field(default_factory=dict)  # first position and experts

    def add_step(self, scheduled: Mapping[str, ScheduledTokens], experts: Mapping[str, np.ndarray]) -> None:
        """Add the experts of the tokens that a step computed, by request."""
        for request, rows in experts.items():  # before any is looked up: a request may use blocks of the same step
            tokens = scheduled[request]
            if self._cached is None:
                places, unknown = self.num_blocks * self.block_size, np.iinfo(rows.dtype).max
                self._cached = np.full((places, *rows.shape[1:]), unknown, rows.dtype)
            self._cached[self._slots(tokens, tokens.start, tokens.start + len(rows))] = rows
        for request, rows in experts.items():
            tokens, chunks = scheduled[request], self._requests.setdefault(request, [])
            if tokens.begins and tokens.start:
                assert self._cached is not None
                chunks.append((0, self._cached[self._slots(tokens, 0, tokens.start)]))
            chunks.append((tokens.start, rows))

    def take(self, request: str) -> np.ndarray | None:
        """Remove and return the experts of a request's tokens, from the first on; None if it has none."""
        chunks = self._requests.pop(request, None)
        if not chunks:
            return None
        rows = chunks[0][1]
        end = max(start + len(part) for start, part in chunks)
        found = np.full((end, *rows.shape[1:]), np.iinfo(rows.dtype).max, rows.dtype)
        for start, part in chunks:
            found[start : start + len(part)] = part
        return found

    def retain(self, requests: Collection[str]) -> None:
        """Forget all requests but these."""
        for gone in [request for request in self._requests if request not in requests]:
            del self._requests[gone]

    def _slots(self, tokens: ScheduledTokens, start: int, end: int) -> np.ndarray:
        """Places of positions start..end in the KV cache."""
        positions = np.arange(start, end)
        blocks = np.asarray(tokens.blocks)[positions // self.block_size - tokens.first_block]
        return blocks * self.block_size + positions % self.block_size
