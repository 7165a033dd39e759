"""Loading and export of Hugging Face folders and Megatron checkpoints, and rejected inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert.hf_files import HFTensor, LoadError, detect_expert_format, open_hf_model
from megatron_webrl.model.hf_config import load_hf_config
from tests.model import ranks, tiny
from tests.model.convert import hf_folders

SIZES = pytest.mark.parametrize("size", [1, 2])
MODELS = pytest.mark.parametrize("name", list(ranks.MODELS))
Found = dict[tuple[int, int], dict[str, Any]]


@SIZES
@MODELS
def test_a_round_trip_through_megatron_is_bit_exact_on_the_first_rank(
    found: Found, folder: Path, size: int, name: str
) -> None:
    exported = found[size, 0][name]["export"]
    assert hf_folders.same(exported, load_file(folder / name / "model.safetensors"))
    assert not found[size, 1][name]["export"]


@SIZES
def test_a_bfloat16_export_is_the_stored_tensors_rounded(found: Found, folder: Path, size: int) -> None:
    stored = load_file(folder / "untied" / "model.safetensors")
    exported = found[size, 0]["bf16"]["export"]
    assert all(torch.equal(exported[key], tensor.bfloat16()) for key, tensor in stored.items())
    assert {dtype for _, _, dtype in found[size, 0]["bf16"]["manifest"]} == {"bfloat16"}


@SIZES
@MODELS
def test_the_manifest_lists_names_shapes_and_dtypes_in_export_order(found: Found, size: int, name: str) -> None:
    exported = found[size, 0][name]["export"]
    expected = [(key, tuple(tensor.shape), str(tensor.dtype)[6:]) for key, tensor in exported.items()]
    assert found[size, 0][name]["manifest"] == expected == found[size, 1][name]["manifest"]


@SIZES
@MODELS
def test_the_parameter_map_has_every_parameter_of_the_model_and_its_shape(found: Found, size: int, name: str) -> None:
    assert found[size, 0][name]["table"] == found[size, 0][name]["shapes"]


@MODELS
def test_a_checkpoint_of_two_tensor_parallel_ranks_or_two_replicas_loads_on_one(found: Found, name: str) -> None:
    for rank in (0, 1):
        for restored in found[1, rank][name]["restored"]:
            assert torch.equal(restored["logits"], found[1, rank][name]["packed"]["logits"])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of "dense", "tied" and "moe"."""
    made = tmp_path_factory.mktemp("checked")
    hf_folders.write_models(made)
    return made


def _check(folder: Path) -> set[str]:
    """Names of the folder's tensors, after all checks."""
    with open_hf_model(folder, load_hf_config(folder)) as model:
        return set(model.tensors)


def _split(models: Path, target: Path) -> dict[str, Any]:
    """The dense model in several files; the content of their index."""
    AutoModelForImageTextToText.from_pretrained(models / "dense").save_pretrained(target, max_shard_size="200KB")
    return json.loads((target / "model.safetensors.index.json").read_text())


BIAS = "model.visual.merger.norm.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra=torch.zeros(2)), r"tensor extra of .*model\.safetensors is unexpected"),
        (lambda t: t.__delitem__(BIAS), rf"{BIAS} \[48\] is missing from .*model\.safetensors"),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(3, 5)}),
            r"lm_head.weight of .*model.safetensors has shape \[3, 5\], expected \[101, 64\]",
        ),
    ],
)
def test_a_folder_with_other_tensors_is_refused_by_name_and_file(
    models: Path, tmp_path: Path, change: Callable, message: str
) -> None:
    damaged = hf_folders.rewritten(models / "dense", tmp_path / "model", change)
    with pytest.raises(LoadError, match=message):
        _check(damaged)


@pytest.mark.parametrize("shape", [(tiny.VOCABULARY, 64), (tiny.VOCABULARY - 1, 64)])
def test_an_output_layer_other_than_the_tied_embedding_is_refused(
    models: Path, tmp_path: Path, shape: tuple[int, int]
) -> None:
    damaged = hf_folders.rewritten(
        models / "tied", tmp_path / "model", lambda t: t.update({"lm_head.weight": torch.zeros(shape)})
    )
    with pytest.raises(LoadError, match=r"lm_head.weight of .*model.safetensors differs from .*embed_tokens.weight"):
        _check(damaged)


@pytest.mark.parametrize("form", hf_folders.FORMS)
def test_every_expert_format_is_detected(models: Path, tmp_path: Path, form: hf_folders.ExpertFormat) -> None:
    source = hf_folders.rewritten(models / "moe", tmp_path / "model", hf_folders.FORMS[form])
    assert _check(source) == set(load_file(source / "model.safetensors"))


@pytest.mark.parametrize(("hidden", "inner"), [(64, 32), (64, 64), (32, 64)])
@pytest.mark.parametrize("form", ["released", "transposed"])
def test_the_expert_format_is_detected_despite_a_square_tensor(
    hidden: int, inner: int, form: hf_folders.ExpertFormat
) -> None:
    hf_config = tiny.configuration(tiny.Shape(experts=4))
    hf_config.text_config.hidden_size, hf_config.text_config.moe_intermediate_size = hidden, inner
    shapes = {mapping.hf_param: mapping.tensor_shape for mapping in parameter_mappings(hf_config, form)}
    tensors = {name: HFTensor(name, Path("model.safetensors"), shape, "F32", None) for name, shape in shapes.items()}
    assert detect_expert_format(hf_config, tensors) == form


def test_experts_in_an_unknown_format_are_refused_by_shape(models: Path, tmp_path: Path) -> None:
    name = "model.language_model.layers.2.mlp.experts.down_proj"
    damaged = hf_folders.rewritten(
        models / "moe", tmp_path / "model", lambda t: t.update({name: torch.zeros(4, 9, 64)})
    )
    with pytest.raises(LoadError, match=r"layers.2.mlp.experts.\S+ of .* has shape .*, expected"):
        _check(damaged)


def test_a_truncated_file_is_refused_with_its_first_broken_tensor(models: Path, tmp_path: Path) -> None:
    damaged = hf_folders.rewritten(models / "dense", tmp_path / "model", lambda tensors: None)
    file = damaged / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(LoadError, match=r"model.safetensors is not a readable safetensors file"):
        _check(damaged)
    file.write_bytes(file.read_bytes()[:5])
    with pytest.raises(LoadError, match=r"model.safetensors is not a readable safetensors file"):
        _check(damaged)


def test_a_sharded_folder_is_read_through_its_index(models: Path, tmp_path: Path) -> None:
    index = _split(models, tmp_path)["weight_map"]
    assert len(set(index.values())) > 1
    assert _check(tmp_path) == set(index)
    (tmp_path / sorted(set(index.values()))[1]).write_bytes(b"no tensors")
    with pytest.raises(LoadError, match=r"model-00002-of.* is not a readable safetensors file"):
        _check(tmp_path)


def test_a_file_that_is_no_index_is_refused(models: Path, tmp_path: Path) -> None:
    _split(models, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(LoadError, match=r"model.safetensors.index.json is not an index"):
        _check(tmp_path)


def test_a_folder_without_weights_is_refused(models: Path, tmp_path: Path) -> None:
    load_hf_config(models / "dense").save_pretrained(tmp_path)
    with pytest.raises(LoadError, match=r"holds neither model\.safetensors nor"):
        _check(tmp_path)


@pytest.mark.parametrize(
    ("part", "setting", "value", "message"),
    [
        ("text_config", "attention_bias", True, "attention_bias=True is not supported"),
        ("text_config", "hidden_act", "gelu", "hidden_act='gelu' is not supported"),
        ("text_config", "head_dim", 64, r"mrope_section=.* must sum to head_dim / 2 = 32"),
        (
            None,
            "model_type",
            "qwen2_vl",
            "model_type='qwen2_vl'; only qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe are",
        ),
    ],
)
def test_an_unsupported_model_is_refused(
    models: Path, tmp_path: Path, part: str | None, setting: str, value: Any, message: str
) -> None:
    content = json.loads((models / "dense/config.json").read_text())
    (content[part] if part else content)[setting] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_hf_config(tmp_path)
