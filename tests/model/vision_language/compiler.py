"""Functions that torch.compile makes faster, without machine code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

from torch._dynamo.testing import CompileCounterWithBackend


@contextmanager
def counted_compiler(module: ModuleType, *plain: Callable) -> Iterator[CompileCounterWithBackend]:
    """The compiler's graphs of both passes of `module`, run without machine code, which takes minutes on a CPU.

    `plain`: run these functions instead, uncompiled.
    """
    counter = CompileCounterWithBackend("aot_eager")
    functions = plain or module.compiled_functions(counter)
    with mock.patch.object(module, "compiled_functions", return_value=functions):
        yield counter
