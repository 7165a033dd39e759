"""Functions that torch.compile makes one kernel of, on CUDA, where they then compute what plain operations do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_webrl.util.text import first_line

COMPILED_ERROR = 2**-6  # of the norm: two roundings to bfloat16, which has 8 bits

Example = Callable[[torch.device, torch.dtype, bool], Sequence[Tensor]]
"""Values and gradients of an example, of plain operations or of the compiled kernels."""


def compile_functions(*functions: Callable[..., Any], backend: Any = "inductor", **options: Any) -> Any:
    """The functions, each of which is compiled when it is first called. `options`: of torch.compile."""
    import torch._inductor.config as inductor  # takes seconds, and only CUDA needs it

    inductor.compile_threads = 1  # else it starts a pool of processes, for a few functions
    return tuple(torch.compile(function, backend=backend, **options) for function in functions)


def compilation_problem(examples: Sequence[Example], device: torch.device, dtype: torch.dtype) -> str:
    """Why the compiled kernels cannot be used on this CUDA device; empty if they compute what plain operations do."""
    import torch._dynamo.config as dynamo

    if dynamo.disable:
        return "torch.compile is disabled"
    try:
        for example in examples:
            plain, compiled = (example(device, dtype, each) for each in (False, True))
            for found, wanted in zip(compiled, plain, strict=True):
                if not (found.float() - wanted.float()).norm() <= COMPILED_ERROR * wanted.float().norm():
                    return "compiled kernels compute other values"
    except Exception as error:  # any: it needs Triton, a C compiler and a folder to write to
        return f"{type(error).__name__}: {first_line(error)[:200]}"
    return ""
