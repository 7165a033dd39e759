"""Checks of Hugging Face folders, and rejected inputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.convert.hf_files import HFTensor, LoadError, detect_expert_format, open_hf_model
from megatron_webrl.model.hf_config import load_hf_config, read_model_config
from tests.model import tiny
from tests.model.convert import hf_folders

BIAS = "model.visual.merger.norm.bias"
DOWN = "model.language_model.layers.2.mlp.experts.down_proj"
FILE = r"of .*model\.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checked")
    hf_folders.write_models(made)
    return made


def _check(folder: Path) -> set[str]:
    with open_hf_model(folder, load_hf_config(folder)) as model:
        return {tensor.name for tensor in (*model.tensors.values(), *model.passthrough.values()) if tensor.dtype}


def _set(name: str, *size: int, dtype: torch.dtype = torch.float32) -> Callable[[hf_folders.Tensors], None]:
    return lambda tensors: tensors.update({name: torch.zeros(size, dtype=dtype)})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dense", _set("extra", 2), rf"tensor extra {FILE} is unexpected"),
        ("dense", _set("mtp.fc.weight", 2), rf"tensor mtp.fc.weight {FILE} is unexpected"),
        ("hybrid", _set("mtp_fc.weight", 2), rf"tensor mtp_fc.weight {FILE} is unexpected"),
        ("dense", lambda tensors: tensors.__delitem__(BIAS), rf"{BIAS} \[48\] is missing from .*model\.safetensors"),
        ("dense", _set("lm_head.weight", 3, 5), rf"lm_head.weight {FILE} has shape \[3, 5\], expected \[101, 64\]"),
        ("dense", _set(BIAS, 48, dtype=torch.float64), rf"{BIAS} {FILE} has type F64"),
        ("tied", _set("lm_head.weight", tiny.VOCABULARY, 64), rf"lm_head.weight {FILE} differs from .*embed_tokens"),
        ("tied", _set("lm_head.weight", 100, 64), rf"lm_head.weight {FILE} differs from .*embed_tokens"),
        ("moe", _set(DOWN, 4, 9, 64), rf"layers.2.mlp.experts.\S+ {FILE} has shape .*, expected"),
    ],
)
def test_a_folder_with_other_tensors_is_refused_by_name_and_file(
    models: Path, tmp_path: Path, name: str, change: Callable, message: str
) -> None:
    damaged = hf_folders.rewritten(models / name, tmp_path / "model", change)
    with pytest.raises(LoadError, match=message):
        _check(damaged)


def test_the_expert_format_is_detected_despite_a_square_tensor() -> None:
    for hidden, inner in ((64, 32), (64, 64), (32, 64)):
        hf_config = tiny.configuration(tiny.Shape(experts=4))
        hf_config.text_config.hidden_size, hf_config.text_config.moe_intermediate_size = hidden, inner
        for form in ("released", "transposed"):
            mappings = parameter_mappings(hf_config, form)
            shapes = {mapping.hf_param: mapping.tensor_shape for mapping in mappings}
            tensors = {name: HFTensor(name, Path("some"), shape, "F32", None) for name, shape in shapes.items()}
            assert detect_expert_format(hf_config, tensors) == form


def test_unreadable_files_and_folders_are_refused_by_file(models: Path, tmp_path: Path) -> None:
    split = tmp_path / "split"
    AutoModelForImageTextToText.from_pretrained(models / "dense").save_pretrained(split, max_shard_size="200KB")
    index = split / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"]
    assert len(set(files.values())) > 1
    assert _check(split) == set(files) == set(load_file(models / "dense" / "model.safetensors"))

    def refuse(folder: Path, message: str) -> None:
        with pytest.raises(LoadError, match=message):
            _check(folder)

    (split / sorted(set(files.values()))[1]).write_bytes(b"no tensors")
    refuse(split, r"model-00002-of.* is not a readable safetensors file")
    index.write_text("[]")
    refuse(split, r"model.safetensors.index.json is not an index")
    cut = hf_folders.rewritten(models / "dense", tmp_path / "cut", lambda tensors: None) / "model.safetensors"
    content = cut.read_bytes()
    for length in (-1, 5):
        cut.write_bytes(content[:length])
        refuse(cut.parent, r"model.safetensors is not a readable safetensors file")
    cut.unlink()
    refuse(cut.parent, r"holds neither model\.safetensors nor")


ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}


@pytest.mark.parametrize(
    ("part", "setting", "value", "message"),
    [
        ("text_config", "attention_bias", True, "attention_bias=True"),
        ("text_config", "hidden_act", "gelu", "hidden_act='gelu'"),
        ("text_config", "head_dim", 64, r"mrope_section=.*32"),
        ("text_config", "rope_parameters", ROPE, "mrope_interleaved=False"),
        ("text_config", "norm_topk_prob", False, "norm_topk_prob=False"),
        (None, "model_type", "qwen2_vl", "model_type='qwen2_vl'; only qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe"),
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
    if part is None:
        with pytest.raises(ConfigError, match=message):
            read_model_config(tmp_path)
