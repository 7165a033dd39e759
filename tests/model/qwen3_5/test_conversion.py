"""Conversion of Qwen3.5 between both kinds of checkpoints is bit-exact, and Megatron reads and writes the same."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatron_webrl.model.layout import ParallelSizes
from tests.gloo import spawn
from tests.model.convert import hf_folders
from tests.model.qwen3_5 import convert_ranks, small

CHECKED = ConversionOptions(verify=True)
LIMIT = 10**9


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small models and of two checkpoints of each."""
    folder = tmp_path_factory.mktemp("convert")
    for seed, (name, shape) in enumerate(small.MODELS.items()):
        small.write_model(folder / name, shape, seed)
        hf_to_megatron(folder / name, folder / f"{name}-converted-1", ParallelSizes(), CHECKED)
        hf_to_megatron(folder / name, folder / f"{name}-converted-2", ParallelSizes(tensor=2, pipeline=2), CHECKED)
    return folder


@pytest.fixture(scope="module")
def found(models: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(layout, model) -> the model's tensors by source; Megatron's checkpoints are saved in the folder."""
    spawn(convert_ranks.run, str(models))
    found: dict[tuple[str, str], dict[str, Any]] = torch.load(models / "found.pt")
    for layout, name in found:
        shutil.copytree(models / f"{name}-converted-1" / "hf", models / f"{name}-{layout}" / "hf")
    return found


@pytest.mark.parametrize("checkpoint", ["converted-1", "converted-2"])
@pytest.mark.parametrize("name", small.MODELS)
def test_a_round_trip_is_bit_exact(models: Path, tmp_path: Path, name: str, checkpoint: str) -> None:
    megatron_to_hf(models / f"{name}-{checkpoint}", tmp_path / "back", LIMIT, CHECKED)
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), hf_folders.read(models / name))


def test_megatron_reads_a_folder_and_converted_checkpoints_in_every_layout(found: dict, models: Path) -> None:
    for (layout, name), fillings in found.items():
        for source, tensors in fillings.items():
            assert hf_folders.same(tensors, hf_folders.read(models / name)), (layout, name, source)


def test_checkpoints_saved_by_megatron_convert_to_the_same_folder(found: dict, models: Path, tmp_path: Path) -> None:
    for layout, name in found:
        target = tmp_path / f"{name}-{layout}"
        megatron_to_hf(models / f"{name}-{layout}", target, LIMIT, CHECKED)
        assert hf_folders.same(hf_folders.read(target), hf_folders.read(models / name)), (layout, name)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (ParallelSizes(tensor=4), "tensor_parallel=4 does not divide num_key_value_heads=2"),
        (ParallelSizes(context=2), "context_parallel=2 cannot split the state of linear attention"),
    ],
    ids=["tensor", "context"],
)
def test_parallel_sizes_that_the_layers_cannot_have_are_refused(
    models: Path, tmp_path: Path, sizes: ParallelSizes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        hf_to_megatron(models / "dense", tmp_path / "out", sizes, CHECKED)
