"""Conversion: bit-exact in both directions at any parallel sizes, loadable by Megatron, strict about its input."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from megatron_webrl.model.convert import conversion
from megatron_webrl.model.convert.atomic_folder import TargetFolderError, atomic_folder, check_free_space
from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron, megatron_to_hf
from megatron_webrl.model.convert.dist_checkpoint_files import DistCheckpointReader, TensorLocation
from megatron_webrl.model.convert.hf_files import PASSTHROUGH_FOLDER, LoadError, copy_passthrough
from megatron_webrl.model.layout import ParallelSizes
from tests.model.convert import hf_folders
from tests.trainer.ranks import process_groups, results

CHECKED = ConversionOptions(verify=True)
SIZES = ParallelSizes(tensor=2, pipeline=2)
LIMIT = 10**9
EMBEDDING = "model.language_model.embed_tokens.weight"
NORM, KEY = "model.language_model.norm.weight", "decoder.final_layernorm.weight"
"""A weight in Hugging Face folders, and in checkpoints."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the small models and of a checkpoint of each, NAME-converted."""
    folder = tmp_path_factory.mktemp("convert")
    hf_folders.write_models(folder)
    for name in hf_folders.MODELS:
        hf_to_megatron(folder / name, folder / f"{name}-converted", SIZES, ConversionOptions())
    return folder


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dense", ParallelSizes(tensor=2, pipeline=4)),
        ("tied", ParallelSizes(pipeline=3)),
        ("moe", ParallelSizes(tensor=2, expert=2)),
        ("hybrid", ParallelSizes()),
        ("hybrid moe", ParallelSizes(tensor=2, pipeline=2, expert=2)),
    ],
    ids=str,
)
def test_a_round_trip_is_bit_exact_at_any_parallel_sizes(
    models: Path, tmp_path: Path, name: str, sizes: ParallelSizes
) -> None:
    hf_to_megatron(models / name, tmp_path / "out", sizes, CHECKED)
    files = list((tmp_path / "out/megatron").glob("*.distcp"))
    assert len(files) == sizes.tensor * sizes.pipeline * sizes.expert
    assert (tmp_path / "out" / PASSTHROUGH_FOLDER).is_dir() == name.startswith("hybrid")
    megatron_to_hf(tmp_path / "out", tmp_path / "back", LIMIT, CHECKED)
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), hf_folders.converted(models, name))
    for file in ("config.json", "tokenizer.json"):
        assert (tmp_path / "back" / file).read_bytes() == (models / name / file).read_bytes()


LAYOUTS: dict[str, tuple[ParallelSizes, list[str]]] = {
    "tensor": (ParallelSizes(tensor=2), ["dense"]),
    "pipeline": (ParallelSizes(pipeline=2), ["hybrid"]),
    "virtual": (ParallelSizes(pipeline=2, virtual=2), ["tied"]),
    "expert": (ParallelSizes(expert=2), ["moe"]),
    "expert tensor": (ParallelSizes(tensor=2, expert_tensor=2), ["hybrid moe"]),
}


def in_layouts(platform: Any, _: Path, folder: Path) -> dict[tuple[str, str], list[dict[str, torch.Tensor]]]:
    """Build models in every layout, fill them from their folder and their checkpoint, and save each once."""
    found = {}
    for layout, (sizes, names) in LAYOUTS.items():
        with process_groups(sizes):
            for name in names:
                found[layout, name] = _examine(folder, name, layout, platform)
    return found


def _examine(folder: Path, name: str, layout: str, platform: Any) -> list[dict[str, torch.Tensor]]:
    from megatron.core import dist_checkpointing

    from megatron_webrl.model.build import build_model, load_hf

    chunks = build_model(folder / name, dtype="float32", platform=platform)
    _fill_with_nan(chunks)
    load_hf(chunks, folder / name)
    found = [_tensors(chunks)]
    saved = folder / f"{name}-{layout}" / "megatron"
    if torch.distributed.get_rank() == 0:
        saved.mkdir(parents=True)
    torch.distributed.barrier()
    dist_checkpointing.save(_state(chunks), str(saved))
    _fill_with_nan(chunks)
    loaded = dist_checkpointing.load(_state(chunks), str(folder / f"{name}-converted/megatron"), strict="raise_all")
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"])
    return [*found, _tensors(chunks)]


def _state(chunks: list[Any]) -> dict[str, Any]:
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(chunks)}


def _fill_with_nan(chunks: list[Any]) -> None:
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(torch.nan)


def _tensors(chunks: list[Any]) -> dict[str, torch.Tensor]:
    from tests.model.hf_export import hf_tensors

    return {name: tensor.clone() for name, tensor in hf_tensors(chunks)}


def test_megatron_loads_folders_and_checkpoints_strictly_in_every_layout_and_saves_what_converts_back(
    models: Path, tmp_path: Path
) -> None:
    found, _ = results(in_layouts, tmp_path, models)
    for (layout, name), fillings in found.items():
        expected = hf_folders.converted(models, name)
        assert len(fillings) == 2
        for tensors in fillings:
            assert hf_folders.same(tensors, hf_folders.weights(expected)), (layout, name)
        saved, target = models / f"{name}-{layout}", tmp_path / f"{name}-{layout}"
        others = shutil.ignore_patterns("megatron")
        shutil.copytree(models / f"{name}-converted", saved, ignore=others, dirs_exist_ok=True)
        megatron_to_hf(saved, target, LIMIT, CHECKED)
        assert hf_folders.same(hf_folders.read(target), expected), (layout, name)


@pytest.mark.parametrize("form", ["released", "separate"])  # the other tests read transposed ones
def test_experts_are_read_in_every_format_and_written_as_released(
    models: Path, tmp_path: Path, form: hf_folders.ExpertFormat
) -> None:
    source = hf_folders.rewritten(models / "moe", tmp_path / "source", hf_folders.FORMS[form])
    hf_to_megatron(source, tmp_path / "out", ParallelSizes(tensor=2), CHECKED)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", LIMIT, CHECKED)
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), hf_folders.converted(models, "moe"))


def test_dtypes_and_every_bit_are_preserved(models: Path, tmp_path: Path) -> None:
    def change(tensors: hf_folders.Tensors) -> hf_folders.Tensors:
        halves = {name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()}
        payload = torch.tensor([0x7F81, 0xFF80, 0x8000, 1]).to(torch.int32).to(torch.int16)
        halves[EMBEDDING][3, :4] = payload.view(torch.bfloat16)  # a NaN with a payload, -inf, -0, a subnormal number
        return halves

    source = hf_folders.rewritten(models / "dense", tmp_path / "source", change)
    hf_to_megatron(source, tmp_path / "out", ParallelSizes(tensor=2, pipeline=2), CHECKED)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", LIMIT, CHECKED)
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), load_file(source / "model.safetensors"))


def test_a_requested_dtype_applies_to_weights_and_config(models: Path, tmp_path: Path) -> None:
    """Also to tensors that no parameter holds."""
    rounded = {name: tensor.half() for name, tensor in hf_folders.converted(models, "hybrid moe").items()}
    half = ConversionOptions(dtype=torch.float16, verify=True)
    hf_to_megatron(models / "hybrid moe", tmp_path / "out", SIZES, half)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", LIMIT, CHECKED)
    megatron_to_hf(models / "hybrid moe-converted", tmp_path / "other", LIMIT, half)
    for folder in (tmp_path / "back", tmp_path / "other"):
        assert hf_folders.same(hf_folders.read(folder), rounded)
        assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"


def test_a_large_model_is_written_in_several_files_with_an_index(models: Path, tmp_path: Path) -> None:
    megatron_to_hf(models / "hybrid moe-converted", tmp_path / "back", 200_000, CHECKED)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text())
    expected = hf_folders.converted(models, "hybrid moe")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(file.stat().st_size < 220_000 for file in files)
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), expected)


def test_an_output_layer_that_equals_the_tied_embedding_is_accepted_and_left_out(models: Path, tmp_path: Path) -> None:
    def add(tensors: hf_folders.Tensors) -> None:
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()

    source = hf_folders.rewritten(models / "tied", tmp_path / "source", add)
    hf_to_megatron(source, tmp_path / "out", ParallelSizes(), CHECKED)
    megatron_to_hf(tmp_path / "out", tmp_path / "back", LIMIT, CHECKED)
    assert hf_folders.same(hf_folders.read(tmp_path / "back"), hf_folders.converted(models, "tied"))


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("moe", ParallelSizes(tensor=3), "tensor_parallel=3 .*num_attention_heads=4"),
        ("moe", ParallelSizes(expert=3), "expert_parallel=3 .*num_experts=4"),
        ("moe", ParallelSizes(pipeline=5), "4 layers"),
        ("hybrid", ParallelSizes(tensor=4), "tensor_parallel=4 .*num_key_value_heads=2"),
        ("hybrid", ParallelSizes(context=2), "context_parallel=2 .*linear attention"),
    ],
    ids=str,
)
def test_parallel_sizes_that_the_model_cannot_have_are_refused(
    models: Path, tmp_path: Path, name: str, sizes: ParallelSizes, message: str
) -> None:
    with pytest.raises(ValueError, match=f"{message}.*{name}/config.json"):
        hf_to_megatron(models / name, tmp_path / "out", sizes, ConversionOptions())
    assert not list(tmp_path.iterdir())


def test_tensors_that_a_checkpoint_stacks_must_have_one_dtype(models: Path, tmp_path: Path) -> None:
    name = "model.language_model.layers.2.self_attn.k_proj.weight"
    source = hf_folders.rewritten(
        models / "dense", tmp_path / "source", lambda tensors: tensors.update({name: tensors[name].bfloat16()})
    )
    with pytest.raises(LoadError, match=rf"{name} of .*model.safetensors has type BF16, but .* F32.*--dtype"):
        hf_to_megatron(source, tmp_path / "out", ParallelSizes(), ConversionOptions())
    hf_to_megatron(source, tmp_path / "out", ParallelSizes(), ConversionOptions(dtype=torch.float32, verify=True))


def _cut(folder: Path) -> None:
    file = max(folder.rglob("*.distcp"), key=lambda path: path.stat().st_size)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def _edit_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        metadata = FileSystemReader(folder / "megatron").read_metadata()
        change(metadata)
        (folder / "megatron/.metadata").write_bytes(pickle.dumps(metadata))

    return edit


def _add_alias(metadata: Any, key: str, alias: str) -> None:
    metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[key]
    for index, place in list(metadata.storage_data.items()):
        if index.fqn == key:
            metadata.storage_data[type(index)(alias, index.offset)] = place


def _widen(folder: Path) -> None:
    content = json.loads((folder / "hf/config.json").read_text())
    content["text_config"]["intermediate_size"] = 128
    (folder / "hf/config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_cut, r"tensor \S+ of .*\.distcp cannot be read"),
        (lambda folder: (folder / "megatron/.metadata").write_bytes(b"no"), r"\.metadata describes no distributed"),
        (lambda folder: (folder / "megatron/.metadata").unlink(), r"is no checkpoint: it holds no megatron/\.metadata"),
        (
            _edit_metadata(lambda metadata: metadata.state_dict_metadata.pop(KEY)),
            r"tensor decoder\.final_layernorm\.weight \[64\] is missing from .*megatron",
        ),
        (
            _edit_metadata(lambda metadata: _add_alias(metadata, KEY, "decoder.more.weight")),
            r"tensor decoder\.more\.weight of .*megatron is unexpected",
        ),
        (
            _edit_metadata(lambda metadata: metadata.state_dict_metadata["output_layer.weight"].chunks.pop()),
            r"tensor output_layer\.weight of .* is not covered once",
        ),
        (_widen, r"tensor \S+linear_fc1\.weight of .*megatron has shape \[4, 224, 64\], expected \[4, 256, 64\]"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_leaves_nothing(
    models: Path, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(models / "dense-converted", tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")
    with pytest.raises(LoadError, match=message):
        megatron_to_hf(tmp_path / "checkpoint", tmp_path / "back", LIMIT, ConversionOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_verifying_finds_a_single_changed_bit(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = conversion.DistCheckpointWriter.finish

    def flip(writer: Any) -> None:
        finish(writer)
        values = DistCheckpointReader(writer.folder).read(TensorLocation(KEY, (), ()), (64,)).numpy().tobytes()
        (path,) = (path for path in writer.folder.glob("*.distcp") if values in path.read_bytes())
        blob = path.read_bytes()
        place = blob.index(values)
        path.write_bytes(blob[:place] + bytes([blob[place] ^ 1]) + blob[place + 1 :])

    monkeypatch.setattr(conversion.DistCheckpointWriter, "finish", flip)
    with pytest.raises(LoadError, match=rf"tensor {NORM} of .*model.safetensors differs"):
        hf_to_megatron(models / "dense", tmp_path / "out", ParallelSizes(), CHECKED)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_replaced_only_with_overwrite_and_only_by_a_complete_one(
    models: Path, tmp_path: Path
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    hf_to_megatron(models / "tied", target, ParallelSizes(), ConversionOptions())
    with pytest.raises(TargetFolderError, match=r"out is not an empty folder.*--overwrite"):
        hf_to_megatron(models / "dense", target, ParallelSizes(), ConversionOptions())
    broken = hf_folders.rewritten(models / "dense", tmp_path / "broken", lambda tensors: tensors.__delitem__(NORM))
    with pytest.raises(LoadError, match="is missing"):
        hf_to_megatron(broken, target, ParallelSizes(), ConversionOptions(overwrite=True))
    assert "output_layer.weight" not in DistCheckpointReader(target / "megatron").tensors
    hf_to_megatron(models / "dense", target, ParallelSizes(), ConversionOptions(overwrite=True))
    assert "output_layer.weight" in DistCheckpointReader(target / "megatron").tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "out"]


def test_the_input_is_never_overwritten(models: Path) -> None:
    for target in (models / "dense", models):
        with pytest.raises(TargetFolderError, match="holds the input"):
            hf_to_megatron(models / "dense", target, ParallelSizes(), ConversionOptions(overwrite=True))


def test_a_link_is_kept_and_the_folder_behind_it_replaced(tmp_path: Path) -> None:
    link, target = tmp_path / "out", tmp_path / "scratch" / "out"
    target.mkdir(parents=True)
    link.symlink_to(target)
    for number in range(2):  # to an empty folder, and to a full one
        with atomic_folder(link, tmp_path / "in", overwrite=True) as folder:
            (folder / str(number)).touch()
        assert link.is_symlink()
        assert [path.name for path in target.iterdir()] == [str(number)]
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_two_writers_of_a_folder_do_not_collide(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "out", tmp_path / "in", overwrite=False) as folder:
        (folder / "part").touch()
        with (
            pytest.raises(TargetFolderError, match=r"another process is writing .*/out"),
            atomic_folder(tmp_path / "out", tmp_path / "in", overwrite=True),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["part"]


def test_a_full_disk_is_refused_with_the_required_space(tmp_path: Path) -> None:
    with pytest.raises(TargetFolderError, match=r"1000000000000\.0 MB"):
        check_free_space(tmp_path, 10**18)


def _flip_a_bit(tensors: hf_folders.Tensors) -> None:
    tensors["mtp.norm.weight"].view(torch.int16)[5] ^= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update(extra=torch.ones(2)), "tensor extra of .* is unexpected"),
        (lambda tensors: tensors.pop("mtp.norm.weight"), "tensor mtp.norm.weight of .* has no counterpart"),
        (_flip_a_bit, r"tensor mtp\.norm\.weight of .* differs from its copy"),
    ],
)
def test_verifying_finds_what_is_wrong_with_copies_of_other_tensors(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable, message: str
) -> None:
    write = conversion.write_passthrough

    def write_and_change(tensors: dict, checkpoint: Path, *options: Any) -> None:
        write(tensors, checkpoint, *options)
        file = checkpoint / PASSTHROUGH_FOLDER / "model.safetensors"
        stored = load_file(file)
        change(stored)
        save_file(stored, file)

    monkeypatch.setattr(conversion, "write_passthrough", write_and_change)
    with pytest.raises(LoadError, match=message):
        hf_to_megatron(models / "hybrid", tmp_path / "out", SIZES, CHECKED)


def test_a_run_keeps_the_other_tensors_of_its_model_or_of_its_newest_checkpoint(models: Path, tmp_path: Path) -> None:
    checkpoint, lost, config_only = models / "hybrid-converted", tmp_path / "lost", tmp_path / "config"
    shutil.copytree(models / "hybrid", lost, ignore=shutil.ignore_patterns("*.safetensors"))
    config_only.mkdir()
    shutil.copy(models / "dense/config.json", config_only)
    expected = load_file(checkpoint / PASSTHROUGH_FOLDER / "model.safetensors")
    for number, (model, newest, kept) in enumerate(
        (
            (models / "hybrid", None, True),
            (checkpoint / "hf", None, True),
            (lost, checkpoint, True),
            (models / "dense", None, False),
            (config_only, None, False),
        )
    ):
        target = tmp_path / str(number)
        target.mkdir()
        copy_passthrough(model, target, newest)
        assert [path.name for path in target.iterdir()] == [PASSTHROUGH_FOLDER] * kept
        if kept:
            assert hf_folders.same(load_file(target / PASSTHROUGH_FOLDER / "model.safetensors"), expected)
