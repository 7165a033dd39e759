"""Assignment of layers and parameters to pipeline stages."""

from __future__ import annotations

import pytest

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layer_split import split_layers
from megatron_webrl.model.layout import ParallelSizes, chunk_of_layer, expert_rank, pipeline_stages
from tests.model import tiny


@pytest.mark.parametrize("layers", [4, 5, 28, 36, 94])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_every_layer_has_one_chunk_and_the_middle_ones_take_the_remainder(layers: int, chunks: int) -> None:
    parts = split_layers(layers, chunks)
    assert [layer for part in parts for layer in part] == list(range(layers))
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    assert lengths[0] == min(lengths)


def test_more_chunks_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"5 pipeline chunks .* exceed 4 layers"):
        split_layers(4, 5)


def test_virtual_chunks_alternate_between_the_stages() -> None:
    sizes = ParallelSizes(pipeline=2, virtual=2)
    assert [chunk_of_layer(layer, 4, sizes) % 2 for layer in range(4)] == [0, 1, 0, 1]
    assert [expert_rank(expert, 8, ParallelSizes(expert=2)) for expert in (0, 3, 4, 7)] == [0, 0, 1, 1]


def test_a_tied_embedding_is_on_the_first_and_last_stage() -> None:
    for tie in (True, False):
        mappings = {e.hf_param: e for e in parameter_mappings(tiny.configuration(tiny.Shape(tie=tie)))}
        sizes = ParallelSizes(pipeline=2)
        stages = {name: pipeline_stages(mapping, 4, sizes, tie) for name, mapping in mappings.items()}
        assert stages["model.language_model.embed_tokens.weight"] == ((0, 1) if tie else (0,))
        assert stages["model.visual.merger.norm.weight"] == (0,)
        assert stages["model.language_model.norm.weight"] == (1,)
        assert stages["model.language_model.layers.2.mlp.up_proj.weight"] == (1,)
