"""Weight transfers over links into real vLLM engines: log-probabilities, errors on both sides, faults, repair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_webrl.weights import vllm_worker
from tests.weights.test_vllm_target import MODELS, TOLERANCE, run
from tools.make_tiny_model import make_tiny_model

pytestmark = pytest.mark.slow

ENGINES = {"dense": 1, "experts": 2}
BROKEN = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module", params=[pytest.param("dense", marks=pytest.mark.soak), "experts"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Report of tests/weights/vllm_link_process.py for one model and engine."""
    folder, ranks = tmp_path_factory.mktemp(request.param), ENGINES[request.param]
    make_tiny_model(folder / "model", **MODELS[request.param])
    if request.param == "dense":
        _store_tied_head(folder / "model")
    found = run("tests.weights.vllm_link_process", folder / "model", str(ranks), folder / "report.json")
    return found | {"ranks": ranks}


def _store_tied_head(model: Path) -> None:
    """Add the output head that is the embedding. vLLM then reports an untied model but ties it."""
    file = model / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is True


def test_after_each_transfer_log_probabilities_equal_those_of_transformers(report: Any) -> None:
    assert report["joined"] == [None] * report["ranks"]
    for (sent, received), stale, fresh in report["rounds"]:
        assert sent == [None, None]
        assert received == [None] * report["ranks"]
        assert fresh < TOLERANCE < 100 * TOLERANCE < stale, "an update that changes nothing would prove nothing"


def test_live_slices_have_the_trainers_checksums(report: Any) -> None:
    assert len(report["sums"]) == report["ranks"]
    for live, trainer in report["sums"]:
        compared = [(mine, theirs) for mine, theirs in zip(live, trainer, strict=True) if mine is not None]
        assert len(compared) > 40
        assert all(mine == theirs for mine, theirs in compared)
        assert len(compared) < len(live), "packed weights are not kept as they came"


def test_ranks_collect_garbage_once_they_have_imported(report: Any) -> None:
    assert report["collects_garbage"] == [True] * report["ranks"]


def test_load_paths_are_counted(report: Any) -> None:
    for paths in report["load_paths"]:
        assert paths.keys() == {"in_place", "reload"}
        assert paths["in_place"]["parameters"] == 45 + (report["ranks"] == 2)
        assert paths["reload"]["bytes"] > paths["in_place"]["bytes"] > 0


def test_a_trainer_with_another_plan_is_refused_on_both_sides(report: Any) -> None:
    refusals = report["refusals"]
    difference = "have different plans"
    assert all(difference in error for error in refusals["model"])
    assert difference in refusals["stored_reason"]
    assert all("the trainer sends by NCCL, but engine 0 computes on cpu" in error for error in refusals["backend"])
    assert all("EngineSizes(tensor=" in error and "pipeline=2" in error for error in refusals["layout"])


def test_an_absent_control_service_missing_fields_or_link_are_errors(report: Any) -> None:
    refusals = report["refusals"]
    assert all(
        "lost the control service at 127.0.0.1:1: no answer within 1 s (Connection refused)" in error
        for error in refusals["silent"]
    )
    assert all("cannot reach the control service within 1 s" in error for error in refusals["missing"])
    assert all("missing.json does not name it yet" in error for error in refusals["missing"])
    assert all("missing 9 required" in error for error in refusals["field"])
    assert all(
        error == "TransferError: no link to the trainer is joined; join one first (init)" for error in refusals["start"]
    )


def test_a_failed_trainer_rank_leaves_a_partially_updated_engine_that_a_new_link_repairs(report: Any) -> None:
    faults = report["faults"]
    assert all(BROKEN in error for error in faults["sent"])
    failed = [error for error in faults["received"] if error is not None]
    assert failed, "no rank of the engine noticed"
    assert all(error.startswith("TransferError: link first failed on rank ") and BROKEN in error for error in failed)
    assert faults["partially_updated"] == [True] * report["ranks"]
    assert any("no link to the trainer is joined" in (error or "") for error in faults["start"])
    assert faults["halfway"] > 100 * TOLERANCE
    assert faults["joined"] == [None] * report["ranks"]
    assert faults["update"] == [[None, None], [None] * report["ranks"]]
    assert faults["partially_updated_after"] == [False] * report["ranks"]
    assert faults["healed"] < TOLERANCE


def test_an_open_update_on_one_rank_does_not_block_the_next(report: Any) -> None:
    assert report["faults"]["again"] == [[None, None], [None] * report["ranks"]]
    assert report["faults"]["again_difference"] < TOLERANCE


def test_the_weight_transfer_engine_is_registered_with_vllm() -> None:
    assert WeightTransferEngineFactory._registry[vllm_worker.BACKEND]() is vllm_worker.ShardTransferEngine
