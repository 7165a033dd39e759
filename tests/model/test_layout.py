"""Assignment of layers to pipeline stages."""

from __future__ import annotations

import itertools

import pytest

from megatron_webrl.model.layer_split import split_layers


def test_every_layer_has_one_chunk_and_the_middle_ones_take_the_remainder() -> None:
    for layers, chunks in itertools.product((4, 5, 28, 94), (1, 2, 3, 4)):
        parts = split_layers(layers, chunks)
        assert [layer for part in parts for layer in part] == list(range(layers))
        lengths = [len(part) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert lengths[0] == min(lengths)
    with pytest.raises(ValueError, match=r"5 pipeline chunks .* 4 layers"):
        split_layers(4, 5)
