"""The reference policy of the KL penalty: weights that wait in host memory and take the model's place for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class ReferencePolicy:
    """The weights that the modules had when this was made.

    Costs one copy of this rank's weights in host memory and, while they are exchanged, one parameter on the device.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._parameters = [parameter for module in modules for parameter in module.parameters()]
        self._waiting = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The modules hold the reference's weights within, and exactly their own again afterwards."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for parameter, waiting in zip(self._parameters, self._waiting, strict=True):
            before = parameter.detach().clone()
            parameter.copy_(waiting)  # in place: optimiser and weight transfer hold views of this memory
            waiting.copy_(before)
