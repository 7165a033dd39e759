"""Weights in and out: Hugging Face folders, Megatron checkpoints, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_webrl.model.load import LoadError, verify
from megatron_webrl.model.parameter_map import model_map
from megatron_webrl.model.qwen3_vl import describe
from tests.model import ranks, tiny

SIZES = pytest.mark.parametrize("size", [1, 2])
MODELS = pytest.mark.parametrize("name", list(ranks.MODELS))
Found = dict[tuple[int, int], dict[str, Any]]


@SIZES
@MODELS
def test_a_round_trip_through_megatron_is_bit_exact_on_every_rank(
    found: Found, folder: Path, size: int, name: str
) -> None:
    stored = load_file(folder / name / "model.safetensors")
    for rank in (0, 1):
        exported = found[size, rank][name]["export"]
        assert exported.keys() == stored.keys()
        assert all(torch.equal(exported[key], tensor) for key, tensor in stored.items())


@SIZES
def test_a_bfloat16_export_is_the_stored_tensors_rounded(found: Found, folder: Path, size: int) -> None:
    stored = load_file(folder / "untied" / "model.safetensors")
    exported = found[size, 0]["bf16"]["export"]
    assert all(torch.equal(exported[key], tensor.bfloat16()) for key, tensor in stored.items())
    assert {dtype for _, _, dtype in found[size, 0]["bf16"]["manifest"]} == {"bfloat16"}


@SIZES
@MODELS
def test_the_manifest_tells_names_shapes_and_types_in_the_order_of_export(found: Found, size: int, name: str) -> None:
    exported = found[size, 0][name]["export"]
    expected = [(key, tuple(tensor.shape), str(tensor.dtype)[6:]) for key, tensor in exported.items()]
    assert found[size, 0][name]["manifest"] == expected == found[size, 1][name]["manifest"]


@SIZES
@MODELS
def test_the_table_knows_every_parameter_of_the_model_and_its_shape(found: Found, size: int, name: str) -> None:
    assert found[size, 0][name]["table"] == found[size, 0][name]["shapes"]


@MODELS
def test_a_checkpoint_of_two_tensor_parallel_ranks_or_two_replicas_loads_on_one(found: Found, name: str) -> None:
    for rank in (0, 1):
        for restored in found[1, rank][name]["restored"]:
            assert torch.equal(restored["logits"], found[1, rank][name]["packed"]["logits"])


def _damage(folder: Path, source: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(extra=torch.zeros(2)), "tensor extra of .*model.safetensors is unexpected"),
        (lambda t: t.pop("model.visual.merger.norm.bias"), "model.visual.merger.norm.bias .* is missing from .*model"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(3, 5)}),
            r"lm_head.weight of .*model.safetensors has shape \[3, 5\], expected \[101, 64\]",
        ),
    ],
)
def test_a_folder_with_other_tensors_is_refused_by_name_and_file(
    references: dict[str, Any], folder: Path, tmp_path: Path, change: Callable, words: str
) -> None:
    damaged = _damage(tmp_path / "model", folder / "untied", change)
    with pytest.raises(LoadError, match=words):
        verify(model_map(describe(damaged)), damaged)


def test_an_output_layer_beside_tied_embeddings_is_refused(
    references: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    width = (tiny.VOCABULARY, 64)
    damaged = _damage(tmp_path / "model", folder / "tied", lambda t: t.update({"lm_head.weight": torch.zeros(width)}))
    with pytest.raises(LoadError, match=r"lm_head.weight .* unexpected.* embeddings are tied"):
        verify(model_map(describe(damaged)), damaged)


def test_a_checkpoint_in_several_files_is_read_through_its_index(references: dict[str, Any], tmp_path: Path) -> None:
    references["untied"].save_pretrained(tmp_path, max_shard_size="200KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    entries = model_map(describe(tmp_path))
    verify(entries, tmp_path)
    assert set(index) == {entry.name for entry in entries}
    (tmp_path / sorted(set(index.values()))[1]).write_bytes(b"no tensors")
    with pytest.raises(LoadError, match=r"model-00002-of.* is not a readable safetensors file"):
        verify(entries, tmp_path)


def test_an_index_that_disagrees_with_its_files_is_refused(references: dict[str, Any], tmp_path: Path) -> None:
    references["untied"].save_pretrained(tmp_path, max_shard_size="200KB")
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    del content["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(content))
    with pytest.raises(LoadError, match=r"tensor lm_head.weight of .* is in the file but not in the index"):
        verify(model_map(describe(tmp_path)), tmp_path)


def test_a_folder_without_weights_is_refused(references: dict[str, Any], tmp_path: Path) -> None:
    references["untied"].config.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"holds neither model\.safetensors nor"):
        verify(model_map(describe(tmp_path)), tmp_path)


@pytest.mark.parametrize(
    ("part", "setting", "value", "words"),
    [
        ("text_config", "attention_bias", True, "attention_bias=True is not supported"),
        ("text_config", "hidden_act", "gelu", "hidden_act='gelu' is not supported"),
        ("text_config", "head_dim", 64, "mrope_section=.* must sum to head_dim / 2 = 32"),
        (None, "model_type", "qwen3_vl_moe", "model_type='qwen3_vl_moe'; only dense"),
    ],
)
def test_a_model_that_is_not_built_here_is_refused(
    references: dict[str, Any], tmp_path: Path, part: str | None, setting: str, value: Any, words: str
) -> None:
    references["untied"].config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    (content[part] if part else content)[setting] = value
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words):
        describe(tmp_path)
