"""Fake CUDA tensors on a machine without a GPU: shapes, dtypes and devices as on CUDA, and every host sync recorded.

`FakeTensorMode` refuses operations that mix CPU and CUDA tensors. `HostValues` adds what it lacks: a copy on the CPU of
each tensor whose values follow from the inputs alone (lengths, indices, masks), which answers `.tolist()` and gives
operations such as `nonzero` their shapes, and a count of the places where the host would wait for the device.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.weak import WeakIdKeyDictionary

aten = torch.ops.aten
OWNERS = ("megatron_webrl", "megatron", "transformers")  # packages whose functions host syncs are attributed to
SHAPE_FROM_VALUES = {"nonzero", "masked_select", "repeat_interleave", "unique_consecutive", "_unique2", "bincount"}
FACTORIES = {"arange", "zeros", "ones", "full", "empty", "scalar_tensor", "zeros_like", "ones_like", "full_like",
             "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"}  # fmt: skip


class HostValues(TorchDispatchMode):
    """Counts host syncs in `syncs` by "file:function kind"; enter it inside `FakeCudaMode`."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: collections.Counter[str] = collections.Counter()
        self._values: WeakIdKeyDictionary = WeakIdKeyDictionary()  # fake tensor -> its values, on the CPU
        self._stale: dict[int, Any] = {}  # storages of values that an operation without values has overwritten

    def fake(self, values: Tensor, device: str) -> Tensor:
        return self._with_values(torch.empty(values.shape, dtype=values.dtype, device=device), values)

    def tolist(self, fake: Tensor) -> Any:
        """`.tolist()`: one copy to the host, also of a CUDA tensor with many elements."""
        if fake.is_cuda:
            self.record("device to host")
        return self.known(fake).tolist()

    def record(self, kind: str) -> None:
        self.syncs[f"{_caller()} {kind}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        on_cuda = any(x.is_cuda for x in tensors)
        if func.namespace == "c10d":
            return _collective(func, args, tensors)
        if name == "_pin_memory":
            return args[0]
        if name == "_local_scalar_dense":
            if on_cuda:
                self.record("device to host")
            with unset_fake_temporarily():
                return self.known(args[0]).item()
        if on_cuda or "device" in kwargs:
            self._record_copies(name, args, kwargs)
        if (name in SHAPE_FROM_VALUES and kwargs.get("output_size") is None) or _is_masked(name, args):
            if on_cuda:
                self.record("shape from values")
            result = self._compute(func, args, kwargs)
            device = "cuda" if on_cuda else "cpu"
            return tree_map(lambda x: self.fake(x, device) if isinstance(x, Tensor) else x, result)
        result = func(*args, **kwargs)
        if name == "topk" and self._get(args[0]) is None:
            self._with_values(result[1], _distinct_indices(args[0], result[1]))
        elif name in FACTORIES or (tensors and all(self._get(x) is not None for x in tensors)):
            self._remember(func, args, kwargs, result)
        else:
            self._forget_written(func, args)
        return result

    def _record_copies(self, name: str, args: Any, kwargs: Any) -> None:
        """Copies between host and device, for which PyTorch waits unless they are `non_blocking`."""
        if name == "_to_copy" and kwargs.get("device") is not None:
            self._record_copy(args[0], torch.device(kwargs["device"]), kwargs.get("non_blocking", False))
        elif name == "copy_":
            self._record_copy(args[1], args[0].device, args[2] if len(args) > 2 else False)
        elif name == "equal":
            self.record("device to host")
        elif name in ("index", "index_put", "index_put_", "_index_put_impl_") and args[0].is_cuda:
            for index in args[1]:
                if index is not None:
                    self._record_copy(index, args[0].device, False)

    def _record_copy(self, source: Tensor, target: torch.device, non_blocking: bool) -> None:
        kinds = {("cuda", "cpu"): "device to host", ("cpu", "cuda"): "host to device"}
        kind = kinds.get((source.device.type, target.type))
        if kind is not None and source.numel() and not non_blocking:
            self.record(kind)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation on the values of its arguments."""

        def on_host(x: Any) -> Any:
            if isinstance(x, Tensor):
                return self.known(x)
            return torch.device("cpu") if isinstance(x, torch.device) else x

        arguments = tree_map(on_host, (args, {**kwargs}))
        if "pin_memory" in arguments[1]:
            arguments[1]["pin_memory"] = False
        with unset_fake_temporarily():
            return func(*arguments[0], **arguments[1])

    def _remember(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        fakes = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        if func._schema.name.endswith("_like") or func._schema.name.startswith("aten::new_"):
            args = (self._shape_of(args[0]), *args[1:])
        values = [x for x in tree_flatten(self._compute(func, args, kwargs))[0] if isinstance(x, Tensor)]
        for fake, value in zip(fakes, values, strict=True):
            self._with_values(fake, value)

    def _shape_of(self, x: Tensor) -> Tensor:
        """A tensor of the same shape and dtype for an operation that reads no values."""
        with unset_fake_temporarily():
            return torch.empty(x.shape, dtype=x.dtype)

    def _forget_written(self, func: Any, args: Any) -> None:
        for argument, declared in zip(args, func._schema.arguments, strict=False):
            if declared.alias_info is not None and declared.alias_info.is_write:
                for x in tree_flatten(argument)[0]:
                    if isinstance(x, Tensor) and (value := self._get(x)) is not None:
                        storage = value.untyped_storage()
                        self._stale[storage._cdata] = storage

    def _with_values(self, fake: Tensor, values: Tensor) -> Tensor:
        if isinstance(fake, FakeTensor):
            self._values[fake] = values
        return fake

    def _get(self, x: Tensor) -> Tensor | None:
        """The values of a tensor, None if they are unknown."""
        if not isinstance(x, FakeTensor):
            return x
        value = self._values.get(x)
        if value is None or value.shape != x.shape:  # an assignment to `x.data` is not dispatched
            return None
        return None if value.untyped_storage()._cdata in self._stale else value

    def known(self, x: Tensor) -> Tensor:
        """The values of a tensor; ones for unknown floating-point values. Raises ValueError for unknown integers."""
        value = self._get(x)
        if value is None and not x.dtype.is_floating_point:
            raise ValueError(f"{_caller()} reads a {x.dtype} tensor {list(x.shape)} whose values are unknown")
        with unset_fake_temporarily():
            return torch.ones(x.shape, dtype=x.dtype) if value is None else value


class FakeCudaMode(FakeTensorMode):
    """FakeTensorMode that starts no CUDA device, also where `torch.cuda.is_available` is replaced."""

    @property
    def avoid_device_init(self) -> bool:
        """Always."""
        return True


def _collective(func: Any, args: Any, tensors: list[Tensor]) -> Any:
    if len({x.device for x in tensors}) > 1:
        raise RuntimeError(f"{_caller()} gives {func} tensors on {sorted({str(x.device) for x in tensors})}")
    work = torch._C._distributed_c10d.FakeWork().boxed()
    returns = [args[0] if "Tensor" in str(each.type) else work for each in func._schema.returns]
    return tuple(returns) if len(returns) > 1 else returns[0]


def _is_masked(name: str, args: Any) -> bool:
    """Whether an indexing operation selects by a mask, whose number of true elements is a shape."""
    return name == "index" and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])


def _distinct_indices(scores: Tensor, indices: Tensor) -> Tensor:
    """Indices in place of those of the largest scores, different ones in each row."""
    count, width = indices.shape[-1], scores.shape[-1]
    with unset_fake_temporarily():
        rows = torch.arange(indices.numel() // max(count, 1))[:, None]
        return ((rows + torch.arange(count)) % width).reshape(indices.shape)


def _caller() -> str:
    """The innermost function of OWNERS on the stack, as "file:function"."""
    frame = sys._getframe(1)
    while frame is not None:
        parts = Path(frame.f_code.co_filename).parts
        for owner in OWNERS:
            if owner in parts:
                start = len(parts) - 1 - parts[::-1].index(owner)
                return f"{'/'.join(parts[start:])}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


@contextlib.contextmanager
def fake_cuda() -> Iterator[HostValues]:
    """Inside, tensors on "cuda" are fake, and functions that need a device are replaced. Autograd runs in this thread:
    a thread per device would need the device."""
    host = HostValues()
    # Streams and events: `synchronize` is a host sync; everything else is order on the device.
    stream = mock.MagicMock(device=torch.device("cuda", 0))
    stream.synchronize.side_effect = lambda: host.record("synchronize")
    stream.record_event.return_value = stream
    properties = mock.Mock(major=9, minor=0, multi_processor_count=132, total_memory=80 * 2**30)
    replaced = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "current_device": lambda: torch.device("cuda", 0),  # a bare index would ask for the device
        "synchronize": lambda device=None: host.record("synchronize"),
        "empty_cache": lambda: None,
        "Stream": lambda *args, **kwargs: stream,
        "Event": lambda *args, **kwargs: stream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed": lambda seed: None,
        "get_device_properties": lambda device=None: properties,
        "get_device_capability": lambda device=None: (9, 0),
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
    }
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        methods = {
            "tolist": lambda self: host.tolist(self),
            "numpy": lambda self: host.known(self).numpy(),  # of a copy on the host
            "record_stream": lambda self, stream: None,
        }
        for name, method in methods.items():
            stack.enter_context(mock.patch.object(FakeTensor, name, method))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeCudaMode())
        stack.enter_context(host)
        yield host
