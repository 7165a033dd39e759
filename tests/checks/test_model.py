"""`webrl check model` on tiny models: transformers, Megatron in several layouts, vLLM."""

from __future__ import annotations

import io
import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
from rich.console import Console

from megatron_webrl.checks import model
from megatron_webrl.checks.model import EXACT, ModelCheckRequest, backend_environment, check_model, judge, make_sample
from megatron_webrl.checks.model_scores import Scores
from megatron_webrl.checks.report import CheckResult
from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from tools.make_tiny_model import make_tiny_model

ROUNDED = ("transformers, bfloat16", "megatron, bfloat16")


def request(folder: Path, *settings: str, **options: Any) -> ModelCheckRequest:
    own = [f"model.path={folder}", "model.dtype=float32", "model.platform=cpu", "run.startup_timeout_seconds=110"]
    return ModelCheckRequest(parse_config(None, [*own, *settings]), **{"max_model_len": 480, "vllm": False, **options})


def run(checked: ModelCheckRequest) -> dict[str, CheckResult]:
    """Results by name; checks that no process is left running."""
    results = check_model(checked, Console(file=io.StringIO()))
    assert not multiprocessing.active_children()
    return {each.name: each for each in results}


def failures(results: dict[str, CheckResult]) -> list[CheckResult]:
    return [each for each in results.values() if each.status == "failed"]


def tampered(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model folder with other tensors."""
    shutil.copytree(folder, target)
    tensors = safetensors.torch.load_file(target / "model.safetensors")
    change(tensors)
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.slow
@pytest.mark.engine
def test_all_three_backends_agree_on_text_and_images(tiny_model: Path) -> None:
    found = run(request(tiny_model, vllm=True))
    assert not failures(found)
    names = [f"{backend}, float32" for backend in ("transformers", "megatron", "vllm")]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        [largest] = [
            each for name, each in found.items()
            if name.startswith(f"{names[first]} - {names[second]}, ") and name.endswith("largest difference")
        ]  # fmt: skip
        assert 0 < largest.value < 1e-4
        assert largest.limit == 1e-3
    assert all(found[f"{name}: score"].value > 0 for name in names)
    assert all(found[f"{name}: peak memory of 1 processes"].value > 64 for name in names)


def test_one_changed_weight_in_megatron_is_caught_by_log_probabilities_and_gradients(
    tiny_model: Path, tmp_path: Path, samples_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["model.visual.merger.linear_fc2.weight"] *= 3.0

    shown = {"role": "user", "content": [{"type": "image", "path": "page.png"}, {"type": "text", "text": "What now?"}]}
    samples = samples_file({"messages": [shown], "response": "I click on the button."})
    changed, start = tampered(tiny_model, tmp_path / "tampered", change), model.run_processes

    def swap(function: str, jobs: list[Any], *arguments: Any) -> Any:
        if function.endswith("megatron"):
            jobs[0].config.model.path = str(changed)
        return start(function, jobs, *arguments)

    monkeypatch.setattr(model, "run_processes", swap)
    logprobs, gradients = failures(run(request(tiny_model, samples=samples, gradients=True)))
    assert logprobs.value > logprobs.limit == 1e-3
    assert "sample 1, token" in logprobs.note
    assert gradients.name.startswith("gradients of megatron")
    assert gradients.value > gradients.limit == 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "experts"),
    [
        (["trainer.pipeline_parallel=2", "trainer.virtual_pipeline=2", "model.dtype=bfloat16"], 0),
        (["trainer.tensor_parallel=2", "trainer.expert_parallel=2"], 4),
    ],
    ids=["pp2-vpp2-bfloat16", "tp2-ep2-float32"],
)
def test_megatron_agrees_in_a_layout(tiny_model: Path, tmp_path: Path, settings: list[str], experts: int) -> None:
    folder = make_tiny_model(tmp_path / "experts", experts=experts) if experts else tiny_model
    found = run(request(folder, *settings, gradients=True))
    assert not failures(found)
    if not experts:
        assert found["mean error of transformers, bfloat16"].value > 0
        assert found["quantile error of megatron, bfloat16"].ratio > 0
    [gradients] = [each for name, each in found.items() if name.startswith("gradients")]
    assert 0 < gradients.value < gradients.limit


def test_bad_options_are_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, says in (
        (["--samples", "none.jsonl"], "--samples=none.jsonl cannot be read"),
        (["--tp", "3"], "tensor_parallel=3 does not divide num_attention_heads=4"),
        (["--ep", "2"], "dense"),
        (["--vpp", "2"], "needs trainer.pipeline_parallel of at least 2"),
        (["--layers", "transformer_engine"], "needs the package transformer_engine"),
        (["--pp", "0"], "--pp=0"),
        (["--head-dtype", "float32"], "model.head_dtype=float32 has no effect"),
        (["--max-model-len", "20"], "--max-model-len"),
        (["--tolerance", "-1"], "--tolerance=-1.0"),
        (["--timeout-seconds", "0"], "--timeout-seconds=0"),
        (["--json", "/none/x.json"], "--json=/none/x.json"),
    ):
        assert main(["check", "model", str(tiny_model), *options]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("backend", ["transformers", "megatron", "vllm"])
def test_float32_is_not_computed_in_tf32(backend: str) -> None:
    for dtype, wanted in (("float32", "0"), ("bfloat16", None)):
        config = parse_config(None, [f"model.dtype={dtype}", "model.platform=cpu"])
        assert backend_environment(backend, config, 1).get("NVIDIA_TF32_OVERRIDE") == wanted


# -- judgement --------------------------------------------------------------------------------------------------------


@pytest.fixture
def samples(processor: Processor) -> list[TrainingSample]:
    """Of one and of three response tokens."""
    question = [{"role": "user", "content": "?"}]
    made = [make_sample(n, question, [], "wait and see", processor, 99) for n in (1, 2)]
    for sample, tokens in zip(made, (1, 3), strict=True):
        object.__setattr__(sample, "response", sample.response[:tokens])
    return made


def found(*logprobs: list[float]) -> Scores:
    return Scores({n: np.array(values, np.float32) for n, values in enumerate(logprobs, 1)}, 1.0)


def test_every_pair_is_compared_by_its_worst_token(
    tiny_model: Path, processor: Processor, samples: list[TrainingSample]
) -> None:
    scores = {
        "a": found([-1.0], [-2.0, -3.0, -4.0]),
        "b": found([-9.0], [-2.0, float("nan"), -4.0]),
        "c": found([-1.1], [-2.0, -3.0, -4.25]),
    }
    results = {each.name: each for each in judge(scores, samples, processor, request(tiny_model, tolerance=0.3))}
    pairs = {name: each for name, each in results.items() if name.endswith("largest difference")}
    assert [each.status for each in pairs.values()] == ["failed", "passed", "failed"]
    assert "sample 2, token 1" in pairs["a - b, 4 tokens: largest difference"].note
    assert "sample 2, token 2" in pairs["a - c, 4 tokens: largest difference"].note
    assert pairs["a - c, 4 tokens: largest difference"].note.endswith("-4.0000, -4.2500")
    assert results["a - c, 4 tokens: mean difference"].value == pytest.approx(0.35 / 4, rel=1e-5)


@pytest.mark.parametrize(("shift", "status"), [(0.05, "passed"), (0.5, "failed"), (float("nan"), "failed")])
def test_bfloat16_is_judged_by_the_error_of_transformers_in_bfloat16(
    tiny_model: Path, processor: Processor, samples: list[TrainingSample], shift: float, status: str
) -> None:
    scores = {
        EXACT: found([-1.0], [-2.0, -3.0, -4.0]),
        ROUNDED[0]: found([-1.1], [-2.1, -3.1, -4.1]),
        ROUNDED[1]: found([-1.0 - shift], [-2.0, -3.0 + shift, -4.0]),
    }
    checked = request(tiny_model, "model.dtype=bfloat16")
    results = {each.name: each for each in judge(scores, samples, processor, checked)}
    assert {results[f"{figure} error of {ROUNDED[1]}"].status for figure in ("mean", "quantile")} == {status}
