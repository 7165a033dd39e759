"""The layer for multi-token prediction of released folders is kept bit for bit, though no parameter holds it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatron_webrl.model.convert.hf_files import PASSTHROUGH_FOLDER, LoadError, copy_passthrough, open_hf_model
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layout import ParallelSizes
from tests.gloo import spawn
from tests.model import tiny
from tests.model.convert import hf_folders
from tests.model.qwen3_5 import convert_ranks, small

CHECKED = ConversionOptions(verify=True)
SIZES = ParallelSizes(tensor=2, pipeline=2)
LIMIT = 10**9


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small models with the tensors of multi-token prediction, and of a checkpoint of each."""
    folder = tmp_path_factory.mktemp("passthrough")
    for seed, (name, shape) in enumerate(small.MODELS.items()):
        small.write_model(folder / "plain" / name, shape, seed)
        added = small.mtp_tensors(shape, seed)
        hf_folders.rewritten(folder / "plain" / name, folder / name, lambda tensors, added=added: tensors | added)
        hf_to_megatron(folder / name, folder / f"{name}-converted", SIZES, CHECKED)
    return folder


@pytest.mark.parametrize("limit", [LIMIT, 100_000], ids=["one file", "many files"])
@pytest.mark.parametrize("name", small.MODELS)
def test_a_round_trip_is_bit_exact(models: Path, tmp_path: Path, name: str, limit: int) -> None:
    megatron_to_hf(models / f"{name}-converted", tmp_path / "back", limit, CHECKED)
    found = hf_folders.read(tmp_path / "back")
    assert hf_folders.same(found, hf_folders.read(models / name))
    assert sum(key.startswith("mtp.") for key in found) == len(small.mtp_tensors(small.MODELS[name], 0))


@pytest.mark.parametrize("name", small.MODELS)
def test_the_weights_of_a_checkpoint_are_those_of_a_folder_without_the_layer(
    models: Path, tmp_path: Path, name: str
) -> None:
    hf_to_megatron(models / "plain" / name, tmp_path / "out", SIZES, CHECKED)
    assert not (tmp_path / "out" / PASSTHROUGH_FOLDER).exists()
    for path in (tmp_path / "out" / "megatron").glob("*.distcp"):
        assert path.read_bytes() == (models / f"{name}-converted" / "megatron" / path.name).read_bytes()


def test_separate_experts_of_the_layer_do_not_decide_how_the_others_are_stored(models: Path) -> None:
    with open_hf_model(models / "sparse", load_hf_config(models / "sparse")) as model:
        assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in model.tensors
        assert "mtp.layers.0.mlp.experts.3.up_proj.weight" in model.passthrough


def test_a_conversion_to_another_type_includes_the_layer(models: Path, tmp_path: Path) -> None:
    wide = ConversionOptions(dtype=torch.float16, verify=True)
    hf_to_megatron(models / "sparse", tmp_path / "out", SIZES, wide)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", LIMIT, CHECKED)
    expected = {name: tensor.half() for name, tensor in hf_folders.read(models / "sparse").items()}
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), expected)


@pytest.mark.parametrize(
    ("shape", "name"),
    [(small.MODELS["dense"], "extra.weight"), (small.MODELS["dense"], "mtp_fc.weight"), (None, "mtp.fc.weight")],
    ids=["unknown", "similar", "Qwen3-VL"],
)
def test_other_unknown_tensors_are_refused_by_name(tmp_path: Path, shape: small.Shape | None, name: str) -> None:
    if shape is None:
        tiny.write_model(tmp_path / "plain", tiny.Shape(), seed=0)
    else:
        small.write_model(tmp_path / "plain", shape, 0)
    hf_folders.rewritten(tmp_path / "plain", tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(2)}))
    with pytest.raises(LoadError, match=rf"tensor {name} of .*model\.safetensors is unexpected"):
        hf_to_megatron(tmp_path / "model", tmp_path / "out", ParallelSizes(), CHECKED)
    assert not (tmp_path / "out").exists()


def _flip_a_bit(tensors: dict[str, torch.Tensor]) -> None:
    tensors["mtp.norm.weight"].view(torch.int16)[5] ^= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update(extra=torch.ones(2)), "tensor extra of .* is unexpected: qwen3_5_moe has no"),
        (lambda tensors: tensors.pop("mtp.norm.weight"), "tensor mtp.norm.weight of .* has no counterpart"),
        (_flip_a_bit, r"tensor mtp\.norm\.weight of .* differs from its copy"),
    ],
)
def test_verifying_finds_what_is_wrong_with_the_copies(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, message: str
) -> None:
    from megatron_webrl.model.convert import conversion

    write = conversion.write_passthrough

    def write_and_change(tensors: dict, checkpoint: Path, *options: object) -> None:
        write(tensors, checkpoint, *options)  # type: ignore[arg-type]
        file = checkpoint / PASSTHROUGH_FOLDER / "model.safetensors"
        stored = load_file(file)
        change(stored)
        save_file(stored, file)

    monkeypatch.setattr(conversion, "write_passthrough", write_and_change)
    with pytest.raises(LoadError, match=message):
        hf_to_megatron(models / "sparse", tmp_path / "out", SIZES, CHECKED)


def test_checkpoints_of_a_trainer_keep_the_layer(models: Path, tmp_path: Path) -> None:
    spawn(convert_ranks.train, str(models), ranks=1)
    for name, shape in small.MODELS.items():
        trained = models / "trained" / name
        megatron_to_hf(trained / "checkpoints", tmp_path / name, LIMIT, CHECKED)
        found, original = hf_folders.read(tmp_path / name), hf_folders.read(models / name)
        kept = {key: tensor for key, tensor in original.items() if key.startswith("mtp.")}
        assert len(kept) == len(small.mtp_tensors(shape, 0))
        assert hf_folders.same(found, torch.load(trained / "weights.pt") | kept)
        assert not hf_folders.same(found, original)  # the optimiser step changed the other weights


def test_a_run_from_the_configuration_of_a_checkpoint_keeps_its_layer(models: Path, tmp_path: Path) -> None:
    copy_passthrough(models / "dense-converted" / "hf", tmp_path, None)
    expected = load_file(models / "dense-converted" / PASSTHROUGH_FOLDER / "model.safetensors")
    assert hf_folders.same(load_file(tmp_path / PASSTHROUGH_FOLDER / "model.safetensors"), expected)


def test_a_resumed_run_whose_model_folder_has_lost_its_weights_keeps_its_layer(models: Path, tmp_path: Path) -> None:
    model = shutil.copytree(models / "dense", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "saved").mkdir()
    copy_passthrough(model, tmp_path / "saved", models / "dense-converted")
    expected = load_file(models / "dense-converted" / PASSTHROUGH_FOLDER / "model.safetensors")
    assert hf_folders.same(load_file(tmp_path / "saved" / PASSTHROUGH_FOLDER / "model.safetensors"), expected)


def test_a_model_folder_without_the_layer_leaves_no_folder(models: Path, tmp_path: Path) -> None:
    copy_passthrough(models / "plain" / "dense", tmp_path, None)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    copy_passthrough(tmp_path / "hf", tmp_path, None)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
