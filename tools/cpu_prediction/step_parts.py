"""CPU seconds of an optimizer step by part, as measured: each operation of PyTorch belongs to the module that asked.

A backward operation belongs to the part of its forward one, which the number of its autograd node tells. Between the
operations are Python, autograd and the freeing of memory: seconds of a step without the timer, less those of its parts.
"""

from __future__ import annotations

import bisect
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = {"aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"}
OTHER, GRADIENTS = "other kernels", "gradients and weights"
ACCUMULATION = "AccumulateGrad"  # autograd's node that hands over a parameter's gradient


class OperationTimer(TorchDispatchMode):
    """CPU seconds of operations by part, of this thread; enter it around the passes."""

    def __init__(self, modules: Mapping[torch.nn.Module, str], model: torch.nn.Module) -> None:
        """`modules`: the part of each; `model`: operations after it are the output layer's, before it gradients'."""
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)
        self.operations = 0
        self._part, self._starts, self._parts = GRADIENTS, list[int](), list[str]()
        self._watch(model, OTHER, after="output layer")
        for module, part in modules.items():
            self._watch(module, part)

    def _watch(self, module: torch.nn.Module, part: str, after: str | None = None) -> None:
        entered: list[str] = []

        def enter(*_: Any) -> None:
            entered.append(self._part)
            self._change(part)

        def leave(*_: Any) -> None:
            before = entered.pop()
            self._change(before if after is None else after)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def _change(self, part: str) -> None:
        self._part = part
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._parts.append(part)

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Count the operations inside: forward and backward passes."""
        self._part = GRADIENTS
        self._starts.clear()
        self._parts.clear()
        with self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        part = self._part_of(torch._C._current_autograd_node())
        if part == OTHER and func._schema.name in PRODUCTS:
            part = "products"
        begun = time.thread_time_ns()
        result = func(*args, **(kwargs or {}))
        self.seconds[part] += (time.thread_time_ns() - begun) * 1e-9
        self.operations += 1
        return result

    def _part_of(self, node: Any) -> str:
        if node is None:
            return self._part
        self._part = GRADIENTS  # after the backward pass
        if ACCUMULATION in node.name():
            return GRADIENTS
        place = bisect.bisect_right(self._starts, node._sequence_nr()) - 1
        return self._parts[place] if place >= 0 else OTHER


class _Counter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def count_operations(work: Callable[[], Any]) -> int:
    """Number of PyTorch's operations, those of backward passes and views with them."""
    with _Counter() as counter:
        work()
    return counter.operations
