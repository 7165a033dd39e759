"""How a model is computed, apart from what it computes: the same weights give the same numbers under all of these."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
LayerImplementation = Literal["local", "transformer_engine"]
AttentionKernel = Literal["sdpa", "flash"]


class MissingLibraryError(RuntimeError):
    """A setting asks for a library that is not installed. The message is one line and names both."""


@dataclass(frozen=True)
class ComputeOptions:
    """Choices of computation.

    - sequence_parallel: between the split parts of a layer, tensor-parallel ranks share the tokens out.
    - recompute: what the backward pass computes again instead of keeping: none; selective, attention and MLP; full,
      whole layers.
    - layers: where linear layers and norms come from, megatron-core's own or Transformer Engine.
    - attention: PyTorch's scaled_dot_product_attention per sample, or flash-attn's variable-length kernel.
    - train_vision: whether the vision tower takes gradients.

    Raises PartMissing for a library that is not there.
    """

    sequence_parallel: bool = True
    recompute: Recompute = "none"
    layers: LayerImplementation = "local"
    attention: AttentionKernel = "sdpa"
    train_vision: bool = True

    def __post_init__(self) -> None:
        for setting, value, wanted, library in (
            ("layers", self.layers, "transformer_engine", "transformer_engine"),
            ("attention", self.attention, "flash", "flash_attn"),
        ):
            if value == wanted and importlib.util.find_spec(library) is None:
                raise MissingLibraryError(f"{setting}={value} needs the package {library}, which is not installed here")
