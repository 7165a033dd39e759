"""Arithmetic of splitting a model: divisibility, layers of each pipeline chunk, sparse layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_webrl.config.setting import ConfigError


def check_divides(divisor: str, size: int, dimension: str, value: int, source: str = "") -> None:
    """Raise ConfigError unless `size` divides the dimension. `divisor`: name of the size; `source`: where it is set."""
    if value % size:
        where = f" ({source})" if source else ""
        raise ConfigError(f"{divisor}={size} does not divide {dimension}={value}{where}")


def split_layers(layers: int, chunks: int) -> tuple[range, ...]:
    """Layers of each pipeline chunk, in order, split evenly. Raises ValueError if a chunk would be empty.

    The middle chunks take the remainder: the first also holds embeddings and vision tower, the last the output layer.
    """
    if layers < chunks:
        raise ValueError(f"{chunks} pipeline chunks (pipeline_parallel x virtual_pipeline) exceed {layers} layers")
    share, remainder = divmod(layers, chunks)
    by_distance = sorted(range(chunks), key=lambda chunk: (abs(2 * chunk - chunks + 1), -chunk))
    larger = set(by_distance[:remainder])
    ranges, start = [], 0
    for chunk in range(chunks):
        end = start + share + (chunk in larger)
        ranges.append(range(start, end))
        start = end
    return tuple(ranges)


def is_sparse_layer(layer: int, dense: Sequence[int], step: int) -> bool:
    """Whether a layer is sparse: every `step`th (decoder_sparse_step in config.json) but `dense` (mlp_only_layers)."""
    return layer not in dense and (layer + 1) % step == 0
