"""What `python -m tools.gpu_proof` judges; the proof itself is a soak: it installs all packages of a GPU node."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_proof import fake_gpu
from tools.gpu_proof.__main__ import check_lock, files_of_two, judge_engine, released_configs, run
from tools.gpu_proof.engines import Engine

ROOT = Path(__file__).parents[2]
HEAD = "# - Engines of two GPUs: the weights are 20 GiB, with room for contexts.\nrun: {}\n"
GOOD = {
    "ranks": 2, "gib": 10.0, "engine_gib": 20.4, "predicted_gib": 10.0, "cache_bytes": 64,
    "predicted_cache_bytes": 64.0, "requests": 32, "gpu_gib": 80.0, "graphs": [1, 2, 32], "runner": "V2",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, ""),
        ({"predicted_gib": 0.0, "predicted_cache_bytes": 0.0}, ""),
        ({"error": "ValueError: parameter x of this rank"}, "parameter x"),
        ({"gib": 10.1}, "GiB of the largest rank: 10.1, predicted 10"),
        ({"cache_bytes": 128}, "bytes of a token in the KV cache: 128, predicted 64"),
        ({"engine_gib": 25.0}, "GiB of weights by the head of the file: 25, predicted 20"),
        ({"runner": "V1"}, "takes model runner V1"),
        ({"reloaded": 3}, "cannot write 3 parameters in place"),
        ({"graphs": [1, 16]}, "no graph for 32 requests"),
        ({"graphs": []}, "no graph for 32 requests"),
        ({"gpu_gib": 141.0}, "cluster.gpu_gib=141, but the card has 80 GiB"),
    ],
)
def test_an_engine_is_compared_with_the_estimate_and_the_head_of_its_file(changed: dict[str, Any], reason: str) -> None:
    found = judge_engine(asdict(Engine(**{"config": "mine", "card": "H100", **GOOD, **changed})), HEAD)
    assert (found.status, found.name, reason in found.note) == ("failed" if reason else "passed", "mine", True)


def test_files_of_two_installed_packages_are_found(tmp_path: Path) -> None:
    for name, files in {"one": ["a/x.py", "b.py"], "two": ["b.py", "a/__pycache__/x.pyc"], "three": ["c.py"]}.items():
        (folder := tmp_path / f"{name}-1.0.dist-info").mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, "a/__pycache__/x.pyc"]))
        for path in (tmp_path / file for file in files):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    assert {name: sorted(owners) for name, owners in files_of_two(tmp_path).items()} == {"b.py": ["one", "two"]}


def test_a_pin_that_is_not_installed_is_named(tmp_path: Path) -> None:
    (folder := tmp_path / "Some_Thing-1.0.dist-info").mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: Some_Thing\nVersion: 1.0\n")
    (lock := tmp_path / "lock.txt").write_text("some-thing==1.0\nother==2 ; python_version > '3'\n")
    pins, owners = check_lock("lock", lock, tmp_path)
    assert (pins.value, pins.note, pins.status, owners.status) == (1, "other==2", "failed", "passed")


def test_the_output_of_a_command_is_read_until_it_fails_or_its_time_is_over(tmp_path: Path) -> None:
    lines = []
    failing, slow = ("echo a; exit 3", 60, "a"), ("echo b; sleep 60 & sleep 60", 1, "no end within 1 s")
    for script, seconds, reason in (failing, slow):
        with pytest.raises(RuntimeError, match=reason):
            lines.extend(run(["bash", "-c", script], seconds))
    assert [*lines, *run(["echo", "c"], 60)] == ["a\n", "b\n", "c\n"]


def test_every_configuration_of_a_released_model_is_proven() -> None:
    names = {path.stem for path in released_configs()}
    assert {"tiny_1gpu", "2b_1gpu", "8b_1node", "235b_a22b_32node", "qwen3_5_9b_1node", "webgym_8b_4node"} <= names
    others = {path.stem for path in (ROOT / "configs").glob("*.yaml")} - names
    assert others == {"quickstart", "miniwob", "warm_start", "warm_start_notes", "webgym_offline", "normalisers"}


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_the_packages_of_a_gpu_node_import_and_make_every_engine_at_every_rank(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "tools.gpu_proof", "--part", "lock", "--part", "engines", "--json", report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=5300)
    assert done.returncode == 0, done.stdout[-4000:]
    results = json.loads(report.read_text())["results"]
    assert len(results) > len(released_configs()) * len(fake_gpu.CARDS)
