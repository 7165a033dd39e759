"""The reference policy of the KL penalty: weights in host memory that are swapped into the model when needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class ReferencePolicy:
    """A copy in host memory of the modules' weights; a swap needs memory for one parameter on the device."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._stored = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swap the reference weights into the modules; on leaving the context, restore the modules' own exactly."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, stored in zip(self._parameters, self._stored, strict=True):
            before = parameter.detach().clone()
            parameter.copy_(stored)  # in place: optimiser and weight transfer have views of this memory
            stored.copy_(before)
