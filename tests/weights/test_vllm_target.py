"""Slices written into a real vLLM model: log-probabilities, memory, and failed transfers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.weights.vllm_target import check_vllm_version
from tools.make_tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = {
    # The vocabulary of the first is padded, and its output head shares the embedding's memory.
    "dense": {"vocabulary": 1000, "seed": 0},
    "experts": {"experts": 4, "tie": False, "seed": 1},
}


def run(module: str, *arguments: str | Path, seconds: float = 800.0) -> Any:
    """Run a module as a process; returns its report, read from the last argument."""
    config = Config()
    config.model.platform = "cpu"
    environment = os.environ | vllm_environment.engine_environment(config)
    environment |= {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # test functions are pickled to the workers
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=seconds, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(Path(arguments[-1]).read_text())


@pytest.fixture(scope="module", params=list(MODELS))
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Report of tests/weights/vllm_process.py for one model."""
    folder = tmp_path_factory.mktemp(request.param)
    make_tiny_model(folder / "model", **MODELS[request.param])
    found = run("tests.weights.vllm_process", folder / "model", folder / "report.json")
    assert found["loaded"] < TOLERANCE, "the engine differs from transformers before any update"
    return found | {"name": request.param}


def test_after_each_update_log_probabilities_equal_those_of_transformers(report: Any) -> None:
    for stale, fresh in report["updates"]["rounds"]:
        assert fresh < TOLERANCE < 100 * TOLERANCE < stale, "an update that changes nothing would prove nothing"
    assert report["finally"] < TOLERANCE


def test_kernels_keep_their_memory(report: Any) -> None:
    assert report["updates"]["moved"] == []
    assert not report["failure"]["moved"]


def test_one_layer_at_a_time_holds_its_loading_form(report: Any) -> None:
    assert report["updates"]["open"] == 1


def test_packed_layers_are_reloaded_and_the_others_written_in_place(report: Any) -> None:
    reloaded = {name for name, way in report["load_paths"].items() if way == "reload"}
    linear = ("qkv", "proj", "linear_fc1", "linear_fc2", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "gate")
    packed = {name for name in report["load_paths"] if name.split(".")[-2] in linear and name.endswith(".weight")}
    packed |= {name for name in report["load_paths"] if name.endswith(("w13_weight", "w2_weight"))}
    assert reloaded == packed - {"visual.patch_embed.proj.weight"}
    assert report["live"] == sorted(set(report["load_paths"]) - reloaded)
    assert len(reloaded) > 20
    assert ("language_model.lm_head.weight" in report["load_paths"]) == (report["name"] == "experts")


def test_a_failed_transfer_leaves_a_running_partial_model_that_a_complete_one_repairs(report: Any) -> None:
    failure = report["failure"]
    before, begun, *broken, healed = failure["partially_updated"]
    assert (before, begun, healed) == (False, False, False)
    assert broken == [True, True, True]
    assert failure["open"] == 0
    assert failure["healed"] < TOLERANCE < 100 * TOLERANCE < failure["halfway"]


def test_a_plan_that_does_not_match_is_refused_by_name(report: Any) -> None:
    wrong, unknown, missing = report["refusals"]
    assert wrong.startswith("ValueError: parameter language_model.model.norm.weight of this rank: vLLM 0.")
    assert "holds (128,), the plan has (3,)" in wrong
    assert "parameter no.such.weight" in unknown
    assert "holds none of this name, the plan has (2, 2)" in unknown
    assert "parameter language_model.model.norm.weight" in missing
    assert "the plan has none of this name" in missing


def test_missing_extra_and_unexpected_slices_are_errors_that_name_the_parameter(report: Any) -> None:
    faults = report["faults"]
    last = faults["last"]
    assert faults["incomplete"].startswith(f"RuntimeError: parameter {last}: 0 of ")
    assert faults["again"].startswith(f"RuntimeError: parameter {last} is complete with ")
    assert faults["more"].startswith(f"RuntimeError: parameter {last} has ")
    assert "has no parameter no.such.weight" in faults["unknown"]
    assert "outside a transfer" in faults["outside"]


def test_rows_that_pad_the_vocabulary_stay_zero(report: Any) -> None:
    assert report["padding"] == 0.0


def test_repeated_updates_do_not_leak_memory(report: Any) -> None:
    updates, grown, model = (report["repeated"][name] for name in ("updates", "grown", "model"))
    assert grown < 0.1 * updates * model, f"{updates} updates of {model:.1f} MiB left {grown:.1f} MiB behind"


def test_unsupported_versions_of_vllm_are_refused() -> None:
    check_vllm_version("0.32.4")
    for version in ("0.31.2", "0.33.0", "0.320.0"):
        with pytest.raises(RuntimeError, match=rf"vLLM {version} is installed; .* support 0\.32\.x only"):
            check_vllm_version(version)
