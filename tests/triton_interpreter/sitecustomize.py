"""Let the CPU build of vLLM take the interpreter of Triton: runs at the start of processes (tests/model_runner.py)."""

from collections.abc import Callable
from typing import Any

import numpy as np
from triton import language as tl
from triton.backends import Backend, backends
from triton.backends.nvidia.compiler import CUDABackend
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

# vLLM asks for a backend of this name, and then for no more of it: the interpreter compiles nothing.
backends["cpu"] = Backend(CUDABackend, CudaDriver)
of_numbers = InterpreterBuilder.binary_op


def binary_op(builder: InterpreterBuilder, left: Any, right: Any, operation: Callable[..., np.ndarray]) -> TensorHandle:
    """Compute bfloat16 in float32, rounded: the interpreter would multiply the integers that hold it."""
    if left.dtype.scalar != tl.bfloat16:
        return of_numbers(builder, left, right, operation)
    found = operation(*((each.data.astype(np.uint32) << 16).view(np.float32) for each in (left, right)))
    if found.dtype == np.float32:
        bits = found.view(np.uint32)
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return TensorHandle(found, tl.bfloat16)


InterpreterBuilder.binary_op = binary_op
