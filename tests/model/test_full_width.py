"""Models of two layers with all widths of released ones: conversion, the three backends, weight updates, a job.

Where two layers take too much memory, one does, with fewer entries of the vocabulary: docs/model.md, "Full width".
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_webrl.cli import main
from megatron_webrl.model.convert.hf_files import bitwise_equal, open_tensors
from megatron_webrl.model.parameter_counts import QWEN3_5_NAMES
from tests.launch.whole_jobs import Job
from tests.model import full_width, tiny
from tests.tiny_settings import SETTINGS
from tools import hf_to_megatron, megatron_to_hf

TIMEOUT_SECONDS = 1800
SMALL_VOCABULARY = 32768
CONVERTED = (
    "2B", "4B", "8B", "32B", "30B-A3B", "235B-A22B",
    "Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B", "Qwen3.5-122B-A10B",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A released size with these layers; `vocabulary`: its number of entries if not the released one."""

    name: str
    dtype: str
    layers: tuple[str, ...] = full_width.LAYERS
    vocabulary: int | None = None

    @property
    def is_sparse(self) -> bool:
        return "-A" in self.name

    @property
    def id(self) -> str:
        """The name, and the kind of the layer if there is one alone."""
        return self.name if len(self.layers) > 1 else f"{self.name}-{self.layers[0].removesuffix('_attention')}"

    def write(self, folder: Path) -> Path:
        return full_width.write(folder, self.name, getattr(torch, self.dtype), self.layers, self.vocabulary)


def cases(*parameters: Case, quick: Container[str] = ()) -> Any:
    """Parametrise a test. `quick`: sizes that take less than a minute and 4 GiB."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(case, id=case.id, marks=pytest.mark.slow if case.name in quick else pytest.mark.soak)
            for case in parameters
        ],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose content, of up to tens of GB, is removed after the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


def not_passed(report: Path) -> list[dict[str, Any]]:
    """Lines of the report of a check that failed or were skipped."""
    return [line for line in json.loads(report.read_text())["results"] if line["status"] != "passed"]


@cases(*(Case(name, "bfloat16") for name in CONVERTED), quick=("2B", "4B"))
def test_a_released_width_converts_there_and_back_byte_for_byte(folder: Path, case: Case) -> None:
    source, between, target = case.write(folder / "source"), folder / "between", folder / "target"
    layout = ["--tp", "2", "--pp", "2", *["--ep", "4"] * case.is_sparse]
    assert hf_to_megatron.main([str(source), str(between), *layout]) == 0
    assert megatron_to_hf.main([str(between), str(target), "--shard-size", "2GB"]) == 0
    assert not different_tensors(source, target)


@cases(
    *(Case(name, "float32") for name in ("2B", "4B", "8B", "30B-A3B")),
    Case("32B", "bfloat16"),
    Case("235B-A22B", "bfloat16", (tiny.FULL,), SMALL_VOCABULARY),
    *(Case(name, "bfloat16") for name in ("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-27B", "Qwen3.5-35B-A3B")),
    *(Case("Qwen3.5-122B-A10B", "bfloat16", (layer,), SMALL_VOCABULARY) for layer in full_width.LAYERS),
)
def test_all_backends_agree_at_a_released_width(folder: Path, case: Case) -> None:
    source, report = case.write(folder / "source"), folder / "report.json"
    layout = ["--tp", "2", *["--ep", "2"] * case.is_sparse]
    options = ["--dtype", case.dtype, "--platform", "cpu", "--max-model-len", "480", "--json", str(report)]
    assert main(["check", "model", str(source), *layout, *options]) == 0
    assert not not_passed(report)


@cases(
    *(Case(name, "bfloat16") for name in ("2B", "4B", "8B", "32B", "30B-A3B")),
    *(Case(name, "bfloat16") for name in ("Qwen3.5-4B", "Qwen3.5-9B", "Qwen3.5-35B-A3B")),
    Case("Qwen3.5-27B", "bfloat16", vocabulary=SMALL_VOCABULARY),
)
def test_every_slice_of_a_released_width_reaches_the_engine(folder: Path, case: Case) -> None:
    source, report, config = case.write(folder / "source"), folder / "report.json", folder / "config.yaml"
    model = {"path": str(source), "dtype": case.dtype, "platform": "cpu"}
    run = {"name": "width", "directory": str(folder / "runs")}
    config.write_text(yaml.safe_dump({**SETTINGS, "model": model, "run": run}))
    assert main(["check", "weights", str(config), "--json", str(report)]) == 0
    assert not not_passed(report)


@cases(
    Case("2B", "float32"),
    *(Case(name, "float32", vocabulary=SMALL_VOCABULARY) for name in ("4B", "Qwen3.5-4B")),
)
def test_a_job_of_a_released_width_trains_and_resumes_with_the_same_bits(folder: Path, case: Case) -> None:
    job = Job(folder, case.write(folder / "model"), name=f"width-{os.getpid()}")
    settings = [
        f"model.dtype={case.dtype}", "model.platform=cpu", "weights.verify=true", "rollout.kv_cache_mib=64",
        "trainer.checkpoint.optimizer_shards=ranks", "trainer.checkpoint.keep=1",
    ]  # fmt: skip
    limit = 1e-3
    if case.name in QWEN3_5_NAMES:  # whose linear attention vLLM computes on the CPU in bfloat16 only
        settings, limit = [*settings, "rollout.dtype=bfloat16"], 0.5
    try:
        job.start("trainer.updates=1", *settings)
        assert job.wait(TIMEOUT_SECONDS) == 0, job.output()
        first = export(job, folder / "first")
        # Steps of this length change no weight: all of them are those of the first job's checkpoint.
        still = ["trainer.optimizer.learning_rate=1e-30", "trainer.optimizer.weight_decay=0"]
        job.start("run.resume=true", "trainer.updates=2", *settings, *still)
        assert job.wait(TIMEOUT_SECONDS) == 0, job.output()
        second, summary = export(job, folder / "second"), job.summary()
    finally:
        job.close()
    assert [update["version"] for update in summary["updates"]] == [1, 2]
    assert all(update["logprob_mismatch_max"] <= limit for update in summary["updates"])
    assert summary["accounting"]["matches"]
    assert different_tensors(Path(job.model), first)
    assert not different_tensors(first, second)


def export(job: Job, target: Path) -> Path:
    """The weights of the job's last checkpoint as a Hugging Face folder."""
    assert megatron_to_hf.main([job.summary()["checkpoint"], str(target)]) == 0
    return target


def different_tensors(one: Path, other: Path) -> list[str]:
    """Names of the tensors of two folders that differ in any bit."""
    with open_tensors(one) as before, open_tensors(other) as after:
        assert before.keys() == after.keys()
        return [name for name, tensor in before.items() if not bitwise_equal(tensor[...], after[name][...])]
