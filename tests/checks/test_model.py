"""`webrl check model` on tiny models: transformers, Megatron in several layouts, vLLM."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
from rich.console import Console

from megatron_webrl.checks.model import EXACT, backend_environment, check_model
from megatron_webrl.checks.model_scores import ModelCheckRequest
from megatron_webrl.checks.report import CheckResult
from megatron_webrl.cli import main
from megatron_webrl.model.layout import ParallelSizes
from tools.make_tiny_model import make_tiny_model

FAST = {"max_model_len": 480, "max_new_tokens": 6, "platform": "cpu", "timeout_seconds": 240.0}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny mixture of experts."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "experts", experts=4)


def run(request: ModelCheckRequest, folders: dict[str, Path] | None = None) -> dict[str, CheckResult]:
    """Results by name; checks that no process is left running."""
    results = check_model(request, Console(file=io.StringIO()), folders)
    assert not [child for child in psutil.Process().children() if "checks.processes" in " ".join(child.cmdline())]
    return {each.name: each for each in results}


def failures(results: dict[str, CheckResult]) -> list[CheckResult]:
    return [each for each in results.values() if each.status == "failed"]


def tampered(model: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model folder with other tensors."""
    shutil.copytree(model, folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_all_three_backends_agree_on_text_and_images(tiny_model: Path):
    found = run(ModelCheckRequest(tiny_model, **FAST))
    assert not failures(found)
    names = [f"{backend}, float32" for backend in ("transformers", "megatron", "vllm")]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        [largest] = [
            each for name, each in found.items()
            if name.startswith(f"{names[first]} - {names[second]}, ") and name.endswith("largest difference")
        ]  # fmt: skip
        assert 0 < largest.value < 1e-4
        assert largest.limit == 1e-3
        assert int(largest.name.split(", ")[-1].split()[0]) > 12  # tokens
    assert all(found[f"{name}: score"].value > 0 for name in names)
    assert all(found[f"{name}: peak memory of 1 processes"].value > 64 for name in names)


def test_one_changed_weight_in_megatron_is_caught(tiny_model: Path, tmp_path: Path, samples_file: Callable[..., Path]):
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.visual.merger.linear_fc2.weight"] *= 3.0

    shown = {"role": "user", "content": [{"type": "image", "path": "page.png"}, {"type": "text", "text": "What now?"}]}
    samples = samples_file({"messages": [shown], "response": "I click on the button."})
    folders = {"megatron": tampered(tiny_model, tmp_path / "tampered", change)}
    [failure] = failures(run(ModelCheckRequest(tiny_model, samples=samples, vllm=False, **FAST), folders))
    assert failure.value > failure.limit == 1e-3
    assert "line 1, token" in failure.note
    [failure] = failures(run(ModelCheckRequest(tiny_model, samples=samples, vllm=False, tolerance=0.0, **FAST)))
    assert 0.0 == failure.limit < failure.value < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        pytest.param(ParallelSizes(pipeline=2, virtual=2), "bfloat16", marks=pytest.mark.soak),
        (ParallelSizes(tensor=2, expert=2), "float32"),
    ],
    ids=["pp2-vpp2-bfloat16", "tp2-ep2-float32"],
)
def test_megatron_agrees_with_transformers_in_a_layout(
    tiny_model: Path, experts: Path, sizes: ParallelSizes, dtype: str
):
    model = experts if sizes.expert > 1 else tiny_model
    found = run(ModelCheckRequest(model, sizes=sizes, dtype=dtype, vllm=False, **FAST))
    assert not failures(found)
    if dtype == "bfloat16":
        assert found["mean error of transformers, bfloat16"].value > 0
        assert found["quantile error of megatron, bfloat16"].ratio > 0
    else:
        assert f"{EXACT}: score" in found


def test_a_missing_tensor_is_named(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    broken = tampered(tiny_model, tmp_path / "broken", lambda tensors: tensors.pop(name))
    options = ["--no-vllm", "--max-model-len", "480", "--max-new-tokens", "4", "--json", str(tmp_path / "found.json")]
    assert main(["check", "model", str(broken), *options]) == 1
    [result] = json.loads((tmp_path / "found.json").read_text())["results"]
    assert name in result["note"]


def test_a_backend_that_exceeds_its_limit_fails_and_leaves_no_process(tiny_model: Path):
    [failure] = failures(run(ModelCheckRequest(tiny_model, **{**FAST, "timeout_seconds": 0.2})))
    assert failure.note == "it did not finish within 0.2 s (--timeout-seconds=0.2)"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--samples", "none.jsonl"], "samples file none.jsonl cannot be read"),
        (["--tp", "3"], "tensor_parallel=3 does not divide num_attention_heads=4 (--tp)"),
        (["--ep", "2"], "the model is dense"),
        (["--pp", "8"], "--pp=8 --vpp=1"),
        (["--vpp", "2"], "needs a pipeline"),
        (["--layers", "transformer_engine"], "--layers=transformer_engine needs the package transformer_engine"),
        (["--pp", "0"], "--pp=0 must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens=0 must be at least 1"),
        (["--max-model-len", "20"], "--max-model-len"),
        (["--tolerance", "-1"], "--tolerance=-1.0"),
        (["--timeout-seconds", "0"], "--timeout-seconds=0"),
        (["--json", "/none/x.json"], "--json=/none/x.json"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
):
    assert main(["check", "model", str(tiny_model), *options]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_a_folder_of_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["check", "model", str(tmp_path)]) == 2
    assert "model_type='llama'" in capsys.readouterr().err


def test_the_help_shows_an_example(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["check", "model", "--help"])
    assert ended.value.code == 0
    assert "example: webrl check model" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["transformers", "megatron", "vllm"])
def test_float32_is_not_computed_in_tf32(tiny_model: Path, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    for dtype, wanted in (("float32", "0"), ("bfloat16", None)):
        environment = backend_environment(backend, ModelCheckRequest(tiny_model, dtype=dtype, platform="cpu"), 1)
        assert environment.get("NVIDIA_TF32_OVERRIDE") == wanted
