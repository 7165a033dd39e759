"""Where received slices go in one vLLM worker: straight into its parameters, or through the loading form of a layer.

Each layer has one of two ways:

- in place: the kernel computes with the loading form (norms, convolutions, embeddings; on CUDA also unquantised
  linear layers and the fused experts of some kernels). Slices are written into the live parameter, whose memory
  never moves, so CUDA graphs stay valid.
- reload: the kernel computes with something made from the weights (packed by oneDNN on CPU, quantised, shuffled).
  At its first slice the layer gets its loading form back, at this rank's shape and without weight loaders, which
  would cut it by tensor rank once more. When all its elements have arrived vLLM processes it as it did at load,
  copies the result into the kernel's memory, and the loading form is gone. Only layers in between hold one.

It leans on vLLM's layer-wise reload, which is internal to vLLM and changes between minor versions, hence
SUPPORTED_VERSIONS.
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

SUPPORTED_VLLM_VERSIONS = ("0.32",)
"""Minor versions of vLLM whose reload (restore, materialise, process, place back), record of loading forms and kernel
choices were read and tested. Each of them may change in any minor version without notice."""

LoadPath = Literal["in_place", "reload"]

_LOADING_FORM_BACKENDS = {UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON}
"""Kernels of unquantised fused experts that compute, on CUDA, with what the weight loaders fill."""


def check_vllm_version(version: str) -> None:
    """Raise RuntimeError unless `version` of vLLM is one that updates were tested with."""
    if not version.startswith(tuple(f"{minor}." for minor in SUPPORTED_VLLM_VERSIONS)):
        supported = ", ".join(f"{minor}.x" for minor in SUPPORTED_VLLM_VERSIONS)
        raise RuntimeError(
            f"vLLM {version} is installed; weight updates support {supported} only, because they rely on its "
            "internals: install one of those"
        )


class ModelTarget:
    """The parameters of one worker's model as the target of transfers (transport.Target).

    Life: `begin`, then `tensor` and `written` for each slice, then `finish`; after a failure `abandon`. From the
    first slice of a transfer to its `finish` the model is `torn`: it holds weights of two versions and must not
    serve. A failed transfer leaves it torn; a later complete one heals it.
    """

    def __init__(
        self, model: nn.Module, vllm_config: VllmConfig, device: torch.device, expected: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`expected`: shape of every parameter of this rank in loading form (engine_map.parameters).

        Raises ValueError if the model's parameters are others, RuntimeError for an untested version of vLLM.
        """
        check_vllm_version(vllm.__version__)
        self.partially_updated = False
        self._config, self._device = vllm_config, torch.device(device)
        self._held = _held(model)
        self._layers = list(dict.fromkeys(held.layer for held in self._held.values() if held.layer is not None))
        _compare({name: held.shape for name, held in self._held.items()}, expected)
        self._heads: list[Any] = [module for module in model.modules() if _is_packed_head(module, self._device)]
        self._arrived: dict[str, int] | None = None

    def load_paths(self) -> dict[str, LoadPath]:
        """How each parameter is written."""
        return {name: "in_place" if held.layer is None else "reload" for name, held in self._held.items()}

    def bytes_by_load_path(self) -> dict[LoadPath, int]:
        """Bytes of all parameters in loading form by the way they are written."""
        sizes: dict[LoadPath, int] = {"in_place": 0, "reload": 0}
        ways = self.load_paths()
        for name, held in self._held.items():
            sizes[ways[name]] += math.prod(held.shape) * held.dtype.itemsize
        return sizes

    def start_update(self) -> None:
        """Start a transfer; what is left of another is abandoned. Torn as soon as the first tensor is asked for."""
        self.abort_update()
        self._arrived = dict.fromkeys(self._held, 0)

    def tensor(self, parameter: str) -> Tensor:
        """Where slices of a parameter are written: [its shape in loading form], in whatever type vLLM holds it.

        Raises RuntimeError outside a transfer or if all of the parameter has arrived already.
        """
        held, arrived = self._known(parameter)
        if arrived == held.elements:
            raise RuntimeError(f"parameter {parameter} is complete with {held.elements} elements; more were sent")
        self.partially_updated = True
        if held.layer is not None:
            with self._context():
                held.layer.open()
        return getattr(held.module, held.attribute).data

    def mark_written(self, parameter: str, elements: int) -> None:
        """`elements` more of a parameter have arrived. A layer is processed when it has all of its parameters.

        Raises RuntimeError outside a transfer or if more have arrived than the parameter has.
        """
        held, arrived = self._known(parameter)
        if arrived + elements > held.elements:
            raise RuntimeError(f"parameter {parameter} has {held.elements} elements; {arrived + elements} were sent")
        assert self._arrived is not None
        self._arrived[parameter] = arrived + elements
        if held.layer is not None and all(self._is_complete(name) for name in held.layer.parameters):
            with self._context():
                held.layer.close()

    def finish_update(self) -> None:
        """End a transfer: the model is whole. Raises RuntimeError naming the first incomplete parameter."""
        for name, held in self._held.items():
            _, arrived = self._known(name)
            if arrived != held.elements:
                raise RuntimeError(f"parameter {name}: {arrived} of {held.elements} elements arrived; send them all")
        with self._context():
            for head in self._heads:
                head.quant_method.process_weights_after_loading(head)
        self._arrived = None
        self.partially_updated = False

    def abort_update(self) -> None:
        """End a transfer that failed: all layers get back what their kernels compute with. Idempotent."""
        for layer in self._layers:
            layer.abandon()
        self._arrived = None

    def in_place_tensor(self, parameter: str) -> Tensor | None:
        """The memory that the kernel computes with if the parameter is written in place, else None."""
        held = self._held[parameter]
        return getattr(held.module, held.attribute).data if held.layer is None else None

    def _known(self, parameter: str) -> tuple[_Held, int]:
        if self._arrived is None:
            raise RuntimeError(f"parameter {parameter} is used outside a transfer; begin one first")
        if parameter not in self._held:
            raise RuntimeError(f"vLLM's model has no parameter {parameter}; the plan does not fit it")
        return self._held[parameter], self._arrived[parameter]

    def _is_complete(self, parameter: str) -> bool:
        return self._arrived is not None and self._arrived[parameter] == self._held[parameter].elements

    @contextmanager
    def _context(self) -> Iterator[None]:
        # vLLM's methods look up the configuration and make their tensors on the default device.
        with set_current_vllm_config(self._config), torch.device(self._device), torch.no_grad():
            yield


@dataclass(eq=False)
class _Layer:
    """A layer that vLLM processes again, at most once a transfer."""

    module: nn.Module
    parameters: list[str] = field(default_factory=list)  # full names; all must arrive before it is processed
    is_open: bool = False

    def open(self) -> None:
        """Give the layer its loading form, at this rank's shape. Nothing happens if it has it."""
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
                parameter.data.zero_()  # rows of padding, which no transfer fills
        # Buffers are in no transfer; processing must find the values that the kernel has.
        for name, kernel in info.kernel_tensors[1].items():
            buffer = module._buffers.get(name)
            if buffer is not None and (buffer.shape, buffer.dtype) == (kernel.shape, kernel.dtype):
                buffer.copy_(kernel)

    def close(self) -> None:
        """Process the loading form and copy the result into the kernel's memory."""
        method: Any = getattr(self.module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None and current_platform.is_cpu():
            # With a kernel at hand the experts would not be packed, and it would go on with those it packed before.
            method.moe_kernel = None
        try:
            layerwise._layerwise_process(self.module, layerwise.get_layerwise_info(self.module))
        except BaseException:
            if kernel is not None:
                method.moe_kernel = kernel
            raise
        self.is_open = False

    def abandon(self) -> None:
        """Put back what the kernel computes with, if the layer is open."""
        if not self.is_open:
            return
        info = layerwise.get_layerwise_info(self.module)
        layerwise._place_kernel_tensors(self.module, info)
        info.reset()
        self.is_open = False


@dataclass(frozen=True)
class _Held:
    """A loadable parameter of the model."""

    module: nn.Module
    attribute: str
    shape: tuple[int, ...]  # in loading form
    dtype: torch.dtype
    elements: int  # that arrive; without padding
    layer: _Layer | None  # None: written in place


def _held(model: nn.Module) -> dict[str, _Held]:
    """All loadable parameters by name, a shared one (tied output head) under the name of the embedding."""
    found: dict[str, _Held] = {}
    seen: set[int] = set()
    modules = sorted(model.named_modules(), key=lambda item: isinstance(item[1], ParallelLMHead))
    for prefix, module in modules:
        forms = {name: form for name, form in _loading_forms(module).items() if _unseen(module, name, seen)}
        if not forms:
            continue
        layer = None if _is_in_place(prefix, module, forms) else _Layer(module)
        # Unquantised methods leave biases alone, or only widen their type; others may process them with the weight.
        alone = isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod)
        for name, form in forms.items():
            own = None if name == "bias" and alone else layer
            full = f"{prefix}.{name}"
            found[full] = _Held(module, name, tuple(form.shape), form.dtype, _elements(module, form.shape), own)
            if own is not None:
                own.parameters.append(full)
    return found


def _loading_forms(module: nn.Module) -> dict[str, Tensor]:
    """What the weight loaders of a module fill: as recorded at load, and the live ones that reloads pass by."""
    live: dict[str, Tensor] = {name: p for name, p in module._parameters.items() if p is not None}
    info = layerwise.LAYERWISE_INFO.get(module)
    if info is None:
        return live
    return info.restore_metadata[0] | {name: tensor for name, tensor in live.items() if name in SKIP_TENSORS}


def _unseen(module: nn.Module, name: str, seen: set[int]) -> bool:
    parameter = module._parameters.get(name)
    if parameter is None:
        return True  # processing removed it; the loading form brings it back
    if id(parameter) in seen:
        return False
    seen.add(id(parameter))
    return True


def _is_in_place(prefix: str, module: nn.Module, forms: Mapping[str, Tensor]) -> bool:
    """Whether the kernel computes with the loading form; anything not known for sure is reloaded."""
    method = getattr(module, "quant_method", None)
    if method is None and callable(getattr(module, "process_weights_after_loading", None)):
        raise ValueError(
            f"layer {prefix} ({type(module).__name__}) processes its weights in its own way; no update of it is known"
        )
    known: dict[type, Callable[[], bool]] = {
        type(None): lambda: True,
        UnquantizedEmbeddingMethod: lambda: True,
        UnquantizedLinearMethod: current_platform.is_cuda,
        UnquantizedFusedMoEMethod: lambda: (
            current_platform.is_cuda() and getattr(method, "unquantized_backend", None) in _LOADING_FORM_BACKENDS
        ),
    }
    # Not isinstance: a subclass may do more.
    if type(method) not in known or not known[type(method)]():
        return False
    live = module._parameters
    return all(_same_form(live.get(name), form) for name, form in forms.items())


def _same_form(live: Tensor | None, form: Tensor) -> bool:
    return live is not None and (live.shape, live.stride()) == (form.shape, form.stride())


def _elements(module: nn.Module, shape: tuple[int, ...]) -> int:
    """How many elements of a parameter of this shape arrive: all but the rows that pad a vocabulary."""
    if not isinstance(module, VocabParallelEmbedding):
        return math.prod(shape)
    rows = module.shard_indices.num_org_elements + module.shard_indices.num_added_elements
    return rows * math.prod(shape[1:])


def _is_packed_head(module: nn.Module, device: torch.device) -> bool:
    """Whether an output head computes with a packed copy beside its weight, which it may share with an embedding."""
    return (
        device.type == "cpu"
        and isinstance(module, ParallelLMHead)
        and type(module.quant_method) is UnquantizedEmbeddingMethod
    )


def _compare(held: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError naming the first parameter that differs between vLLM's model and the plan."""
    for name in [*expected, *(name for name in held if name not in expected)]:
        mine, theirs = held.get(name), expected.get(name)
        if mine is None or theirs is None or mine != tuple(theirs):
            raise ValueError(
                f"parameter {name} of this rank: vLLM {vllm.__version__} holds {_shape(mine)}, the plan has "
                f"{_shape(theirs)}; trainer and engine need the same model and layout, and kernels that do not pad"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none of this name" if shape is None else str(tuple(shape))


def head_shares_embedding(model: nn.Module) -> bool:
    """Whether the output head's weight is the embedding's."""
    weights = [
        (isinstance(m, ParallelLMHead), m.weight) for m in model.modules() if isinstance(m, VocabParallelEmbedding)
    ]
    return any(head is embedding for is_head, head in weights if is_head for other, embedding in weights if not other)
