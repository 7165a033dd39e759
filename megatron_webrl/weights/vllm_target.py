"""Write received slices into the model of one vLLM worker, in place or through a layer's loading form.

Each layer has one of two load paths:

- in place: the kernel computes with the loading form (norms, convolutions, embeddings; on CUDA also unquantised
  linear layers and the fused experts of some kernels). Slices are written into the live parameter, whose memory
  never moves, so CUDA graphs stay valid.
- reload: the kernel computes with a derived format (packed by oneDNN on CPU, quantised, shuffled). The first slice
  restores the layer's loading form, with this rank's shape and without weight loaders, which would shard it again.
  When all elements have arrived, vLLM processes the layer as at load, copies the result into the kernel's memory and
  frees the loading form. Only partially received layers hold one.

The reload path uses vLLM's layer-wise reload, which changes between minor versions: see SUPPORTED_VLLM_VERSIONS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import vllm
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer, restore_layer_on_meta
from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
from vllm.platforms import current_platform

SUPPORTED_VLLM_VERSIONS = ("0.32",)  # minor versions whose internals used here were reviewed and tested

LoadPath = Literal["in_place", "reload"]

_LOADING_FORM_BACKENDS = {UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON}
"""Kernels of unquantised fused experts that compute with the loading form on CUDA."""


def check_vllm_version(version: str) -> None:
    """Raise RuntimeError unless weight updates support this version of vLLM."""
    if not version.startswith(tuple(f"{minor}." for minor in SUPPORTED_VLLM_VERSIONS)):
        supported = ", ".join(f"{minor}.x" for minor in SUPPORTED_VLLM_VERSIONS)
        raise RuntimeError(
            f"vLLM {version} is installed; weight updates support {supported} only, because they rely on its "
            "internals: install one of those"
        )


class ModelTarget:
    """What a transfer writes to: the model of one vLLM worker.

    Life cycle: `start_update`, then `tensor` and `mark_written` for each slice, then `finish_update`; after a failure
    `abort_update`. From the first slice to `finish_update` the model is `partially_updated`: it holds weights of two
    versions and must not serve. It stays so after a failed transfer until a complete one.
    """

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, device: torch.device, expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`expected`: loading-form shapes. Raises ValueError if the model's differ, RuntimeError: unsupported vLLM."""
        check_vllm_version(vllm.__version__)
        self.partially_updated = False
        self._config, self._device = vllm_config, torch.device(device)
        self._parameters = _loadable_parameters(model)
        self._layers = list(dict.fromkeys(p.layer for p in self._parameters.values() if p.layer is not None))
        _compare({name: p.shape for name, p in self._parameters.items()}, expected)
        self._heads: list[Any] = [module for module in model.modules() if _is_packed_head(module, self._device)]
        self._arrived: dict[str, int] | None = None

    def load_paths(self) -> dict[str, LoadPath]:
        return {name: "in_place" if p.layer is None else "reload" for name, p in self._parameters.items()}

    def bytes_by_load_path(self) -> dict[LoadPath, int]:
        """Bytes of all parameters in loading form, by load path."""
        sizes: dict[LoadPath, int] = {"in_place": 0, "reload": 0}
        paths = self.load_paths()
        for name, parameter in self._parameters.items():
            sizes[paths[name]] += math.prod(parameter.shape) * parameter.dtype.itemsize
        return sizes

    def start_update(self) -> None:
        """Start an update; an unfinished one is aborted."""
        self.abort_update()
        self._arrived = dict.fromkeys(self._parameters, 0)

    def tensor(self, parameter: str) -> Tensor:
        """Tensor to write slices into, in loading form and vLLM's dtype. Raises RuntimeError: no update, or full."""
        loadable, arrived = self._lookup(parameter)
        if arrived == loadable.elements:
            raise RuntimeError(f"parameter {parameter} is complete with {loadable.elements} elements; more were sent")
        self.partially_updated = True
        if loadable.layer is not None:
            with self._context():
                loadable.layer.open()
        return getattr(loadable.module, loadable.attribute).data

    def mark_written(self, parameter: str, elements: int) -> None:
        """Count written elements; processes a complete layer. Raises RuntimeError: no update, or too many elements."""
        loadable, arrived = self._lookup(parameter)
        if arrived + elements > loadable.elements:
            sent = arrived + elements
            raise RuntimeError(f"parameter {parameter} has {loadable.elements} elements; {sent} were sent")
        assert self._arrived is not None
        self._arrived[parameter] = arrived + elements
        names = [] if loadable.layer is None else loadable.layer.parameters
        if loadable.layer is not None and all(self._arrived[n] == self._parameters[n].elements for n in names):
            with self._context():
                loadable.layer.close()

    def finish_update(self) -> None:
        """Finish an update. Raises RuntimeError naming the first incomplete parameter."""
        for name, parameter in self._parameters.items():
            _, count = self._lookup(name)
            if count != parameter.elements:
                raise RuntimeError(f"parameter {name}: {count} of {parameter.elements} elements arrived; send them all")
        with self._context():
            for head in self._heads:
                head.quant_method.process_weights_after_loading(head)
        self._arrived = None
        self.partially_updated = False

    def abort_update(self) -> None:
        """Abort an update: restore the kernel tensors of all layers. Idempotent."""
        for layer in self._layers:
            layer.restore()
        self._arrived = None

    def in_place_tensor(self, parameter: str) -> Tensor | None:
        """Live tensor of a parameter that is written in place, else None."""
        loadable = self._parameters[parameter]
        return getattr(loadable.module, loadable.attribute).data if loadable.layer is None else None

    def _lookup(self, parameter: str) -> tuple[_LoadableParameter, int]:
        if self._arrived is None:
            raise RuntimeError(f"parameter {parameter} is used outside a transfer; call start_update first")
        if parameter not in self._parameters:
            raise RuntimeError(f"vLLM's model has no parameter {parameter}; the plan does not match it")
        return self._parameters[parameter], self._arrived[parameter]

    @contextmanager
    def _context(self) -> Iterator[None]:
        # vLLM's methods use the current configuration and create tensors on the default device.
        with set_current_vllm_config(self._config), torch.device(self._device), torch.no_grad():
            yield


@dataclass(eq=False)
class _Layer:
    """A layer with the reload path; vLLM processes it once per update."""

    module: nn.Module
    parameters: list[str] = field(default_factory=list)  # full names; the layer is processed when all are complete
    is_open: bool = False

    def open(self) -> None:
        """Restore the loading form with this rank's shape, unless the layer is open."""
        if self.is_open:
            return
        module, info = self.module, layerwise.get_layerwise_info(self.module)
        info.kernel_tensors = get_layer_params_buffers(module)
        info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
        self.is_open = True
        restore_layer_on_meta(module, info)
        materialize_layer(module, info)
        for parameter in module._parameters.values():
            if parameter is not None and _elements(module, parameter.shape) < parameter.numel():
                parameter.data.zero_()  # padding rows are not transferred
        # Buffers are not transferred; processing needs the kernel's values.
        for name, kernel in info.kernel_tensors[1].items():
            buffer = module._buffers.get(name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (kernel.shape, kernel.dtype):
                buffer.copy_(kernel)

    def close(self) -> None:
        """Process the loading form and copy the result into the kernel's memory."""
        method: Any = getattr(self.module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and current_platform.is_cpu():
            # With an existing kernel vLLM would not pack the experts again and would use the old ones.
            method.moe_kernel = None
        try:
            layerwise._layerwise_process(self.module, layerwise.get_layerwise_info(self.module))
        except BaseException:
            if kernel is not None:
                method.moe_kernel = kernel
            raise
        self.is_open = False

    def restore(self) -> None:
        """Put back the kernel tensors if the layer is open."""
        if not self.is_open:
            return
        info = layerwise.get_layerwise_info(self.module)
        layerwise._place_kernel_tensors(self.module, info)
        info.reset()
        self.is_open = False


@dataclass(frozen=True)
class _LoadableParameter:
    """A parameter of the model that weights are loaded into."""

    module: nn.Module
    attribute: str
    shape: tuple[int, ...]  # in loading form
    dtype: torch.dtype
    elements: int  # without padding
    layer: _Layer | None  # None: in place


def _loadable_parameters(model: nn.Module) -> dict[str, _LoadableParameter]:
    """Loadable parameters by name; a tied output head appears under the name of the embedding."""
    parameters: dict[str, _LoadableParameter] = {}
    seen: set[int] = set()
    modules = sorted(model.named_modules(), key=lambda item: isinstance(item[1], ParallelLMHead))
    for prefix, module in modules:
        forms = {name: form for name, form in _loading_forms(module).items() if _is_first_use(module, name, seen)}
        if not forms:
            continue
        layer = None if _is_in_place(prefix, module, forms) else _Layer(module)
        # Unquantised methods do not change biases, except for the dtype; others may process them with the weight.
        in_place_bias = isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod)
        for name, form in forms.items():
            parameter_layer = None if name == "bias" and in_place_bias else layer
            full = f"{prefix}.{name}"
            parameters[full] = _LoadableParameter(
                module, name, tuple(form.shape), form.dtype, _elements(module, form.shape), parameter_layer
            )
            if parameter_layer is not None:
                parameter_layer.parameters.append(full)
    return parameters


def _loading_forms(module: nn.Module) -> dict[str, Tensor]:
    """Tensors that a module's weight loaders fill: those recorded at load, and live ones that reloads skip."""
    live: dict[str, Tensor] = {name: p for name, p in module._parameters.items() if p is not None}
    info = layerwise.LAYERWISE_INFO.get(module)
    if info is None:
        return live
    return info.restore_metadata[0] | {name: tensor for name, tensor in live.items() if name in SKIP_TENSORS}


def _is_first_use(module: nn.Module, name: str, seen: set[int]) -> bool:
    parameter = module._parameters.get(name)
    if parameter is None:
        return True  # removed by processing; the loading form restores it
    if id(parameter) in seen:
        return False
    seen.add(id(parameter))
    return True


def _is_in_place(prefix: str, module: nn.Module, forms: Mapping[str, Tensor]) -> bool:
    """Whether the kernel is known to compute with the loading form; unknown layers are reloaded."""
    method = getattr(module, "quant_method", None)
    if method is None and callable(getattr(module, "process_weights_after_loading", None)):
        raise ValueError(
            f"layer {prefix} ({type(module).__name__}) processes its weights itself; its update is not supported"
        )
    known: dict[type, Callable[[], bool]] = {
        type(None): lambda: True,
        UnquantizedEmbeddingMethod: lambda: True,
        UnquantizedLinearMethod: current_platform.is_cuda,
        UnquantizedFusedMoEMethod: lambda: (
            current_platform.is_cuda() and getattr(method, "unquantized_backend", None) in _LOADING_FORM_BACKENDS
        ),
    }
    # Not isinstance: a subclass may process weights differently.
    if type(method) not in known or not known[type(method)]():
        return False
    live = module._parameters
    return all(_same_form(live.get(name), form) for name, form in forms.items())


def _same_form(live: Tensor | None, form: Tensor) -> bool:
    return live is not None and (live.shape, live.stride()) == (form.shape, form.stride())


def _elements(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Transferred elements of a parameter of this shape: all except vocabulary padding."""
    if not isinstance(module, VocabParallelEmbedding):
        return math.prod(shape)
    rows = module.shard_indices.num_org_elements + module.shard_indices.num_added_elements
    return rows * math.prod(shape[1:])


def _is_packed_head(module: nn.Module, device: torch.device) -> bool:
    """Whether an output head computes with a packed copy of its weight, which it may share with an embedding."""
    return (
        device.type == "cpu"
        and isinstance(module, ParallelLMHead)
        and type(module.quant_method) is UnquantizedEmbeddingMethod
    )


def _compare(actual: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError naming the first parameter that differs between vLLM's model and the plan."""
    for name in [*expected, *(name for name in actual if name not in expected)]:
        mine, theirs = (shapes.get(name, "none of this name") for shapes in (actual, expected))
        if mine != theirs:
            raise ValueError(
                f"parameter {name} of this rank: vLLM {vllm.__version__} holds {mine}, the plan has {theirs}; "
                f"trainer and engine need the same model and layout, and kernels that do not pad"
            )


def head_shares_embedding(model: nn.Module) -> bool:
    """Whether the output head shares the embedding's weight."""
    uses = [(isinstance(m, ParallelLMHead), m.weight) for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    return any(head is embedding for is_head, head in uses if is_head for other, embedding in uses if not other)
