"""Compute platform of the trainer: CUDA with NCCL, or the CPU with gloo.

megatron-core names CUDA in many places. On the CPU platform this module, and no other, redirects those names: CUDA
tensors are created on the CPU, streams do nothing (CPU operations run in order), and the CUDA random state is the CPU
generator's. Call `activate` once, in the main thread, before any model is built.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils._device import _device_constructors

from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
_CONSTRUCTORS = (
    *("arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm"),
    *("scalar_tensor", "tensor", "zeros", "zeros_like"),
)


@dataclass(frozen=True)
class Platform:
    """The device of this process and the backend of its process groups."""

    name: Literal["cpu", "cuda"]
    device: torch.device
    backend: Literal["gloo", "nccl"]
    transformer_engine_problem: str = ""  # why it does not import, although it is installed


CONTEXT_BYTES = 2**30  # of one process on a GPU, outside of PyTorch's allocator: CUDA context, loaded kernels

_active: Platform | None = None


def activate(name: str) -> Platform:
    """Activate a platform and return it. Repeated calls for the same platform have no effect.

    "auto" selects CUDA if this process sees a GPU. The CUDA device is LOCAL_RANK, else SLURM_LOCALID, else 0.
    Raises ValueError for an unknown name, RuntimeError if the platform is unavailable or another one is active.
    """
    global _active
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"platform={name!r} is not one of auto, cpu, cuda")
    if _active is not None:
        if name not in ("auto", _active.name):
            raise RuntimeError(f"platform={name} was requested, but this process already uses {_active.name}")
        return _active
    _active = _use_cuda() if selects_cuda(name) else _use_cpu()
    return _active


def selects_cuda(name: str) -> bool:
    """Whether model.platform is CUDA in this process: "cuda", or "auto" if it sees a GPU."""
    return name == "cuda" or (name == "auto" and torch.cuda.is_available())


def limit_memory(platform: Platform, fraction: float) -> None:
    """Limit PyTorch's allocator to `fraction` of the GPU's memory, less the contexts of two processes. CPU: no effect.

    An allocation beyond the limit raises torch.OutOfMemoryError here instead of taking another process's memory.
    """
    if platform.name == "cuda":
        total = torch.cuda.get_device_properties(platform.device).total_memory
        allowed = max(fraction * total - 2 * CONTEXT_BYTES, 0)
        torch.cuda.set_per_process_memory_fraction(allowed / total, platform.device)


def _use_cuda() -> Platform:
    if not torch.cuda.is_available():
        raise RuntimeError("platform=cuda was requested, but this process sees no GPU; use platform=cpu")
    index = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    index = 0 if torch.cuda.device_count() == 1 else index  # a launcher may show each task only its own GPU
    if index >= torch.cuda.device_count():
        raise RuntimeError(
            f"local rank {index} has no GPU: this process sees {torch.cuda.device_count()}; start fewer ranks per node"
        )
    torch.cuda.set_device(index)
    problem = _hide_broken_transformer_engine()
    _define_router_gemm()
    return Platform("cuda", torch.device("cuda", index), "nccl", problem)


def _use_cpu() -> Platform:
    problem = _hide_broken_transformer_engine()
    _redirect_megatron()
    _redirect_random_states()
    _redirect_cuda_functions()
    _redirect_devices()
    return Platform("cpu", CPU, "gloo", problem)


def _hide_broken_transformer_engine() -> str:
    """Import Transformer Engine, if it is installed. One that fails counts as absent; returns why, else nothing.

    megatron-core imports it in many modules, and takes no other error than ImportError for its absence.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return ""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # any: without a library it fails in many ways
        problem = f"{type(error).__name__}: {first_line(error)[:200]}"
        for name in [each for each in sys.modules if each.partition(".")[0] == "transformer_engine"]:
            del sys.modules[name]
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  # lets every import raise ImportError
        log.warning("Transformer Engine is installed but does not import, and is not used: %s", problem)
        return problem
    return ""


def _is_cuda(device: Any) -> bool:
    """Whether a device argument means CUDA. In torch a bare index does."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _redirect_devices() -> None:
    """Create tensors on the CPU, and leave them there, where a call names a CUDA device.

    Functions are replaced one by one: a TorchFunctionMode would cost microseconds in each call of torch.
    """
    _device_constructors()  # torch keeps a set of the functions that its `with torch.device(...)` is for

    def redirect(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def redirected(*args: Any, **kwargs: Any) -> Any:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            return function(*args, **kwargs)

        setattr(owner, name, redirected)

    for name in _CONSTRUCTORS:
        redirect(torch, name)
    for name in ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"):
        redirect(torch.Tensor, name)
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor_to(self, *((CPU, *args[1:]) if args and _is_cuda(args[0]) else args), **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return tensor_type(self, *args, **kwargs)
        return tensor_type(self).replace("torch.", "torch.cuda.", 1)  # Megatron's optimisers sort by this string

    for name, method in {"to": to, "type": type_, "cuda": lambda self, *args, **kwargs: self}.items():
        setattr(torch.Tensor, name, method)


class _Completed:
    """What torch.cuda.Stream and Event are on the CPU, where operations are complete when they return."""

    device = CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _nothing(self, *args: Any) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = synchronize = record = wait = _nothing

    def query(self) -> bool:
        """Always complete."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Return a completed event."""
        return event or _Event()


class _Stream(_Completed):
    pass


class _Event(_Completed):
    pass


def _redirect_cuda_functions() -> None:
    stream = _Stream()

    def no_op() -> Any:
        return lambda *args, **kwargs: None  # one object each: torch's compiler refuses the same one under two names

    @contextlib.contextmanager
    def in_stream(stream: Any) -> Iterator[None]:
        yield

    redirects: dict[str, Any] = {
        "current_device": lambda: CPU,
        "set_device": no_op(),
        "synchronize": no_op(),
        "empty_cache": no_op(),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": in_stream,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.manual_seed(seed),
    }
    for name, value in redirects.items():
        setattr(torch.cuda, name, value)


def _redirect_random_states() -> None:
    """Make Megatron's tracker of named random states use the CPU generator."""
    from megatron.core.tensor_parallel import random

    def set_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    @contextlib.contextmanager  # Megatron's own fork warns about any use of the CPU generator
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"random state {name!r} is unknown; call model_parallel_cuda_manual_seed first")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    random._set_cuda_rng_state = set_state
    random._get_cuda_rng_state = get_state
    random.CudaRNGStatesTracker.fork = fork


def _redirect_megatron() -> None:
    # Megatron compiles small fusions: on the CPU, seconds of imports in each rank and minutes at the first call.
    with mock.patch.object(torch, "compile", lambda function: function):
        from megatron.core import jit  # imports most of Megatron

    jit.disable_jit_fuser()
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    moe_utils.te_general_gemm = None  # Transformer Engine's works on CUDA only

    def to_array(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_array  # Megatron's makes arrays for collectives only on a GPU
    _redirect_uneven_collectives()


def _define_router_gemm() -> None:
    """megatron-core 0.16.1 does not define it without Transformer Engine, but asks for it in the router."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _redirect_uneven_collectives() -> None:
    """Support uneven splits, which expert parallelism needs: gloo gathers and scatters equal sizes only."""
    from megatron.core.tensor_parallel import mappings

    even_gather, even_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def gather(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return even_gather(input_, group, None, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros(max(sizes), *input_.shape[1:])
        padded[: input_.shape[0]] = input_
        parts = even_gather(padded, group).split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def scatter(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return even_scatter(input_, group, None, use_global_buffer)
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].clone()

    mappings._gather_along_first_dim = gather
    mappings._reduce_scatter_along_first_dim = scatter
