"""`webrl check gpu` as a user runs it, on the CPU platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_webrl.checks.gpu import SECTIONS
from megatron_webrl.checks.report import failed, measured, write_json
from megatron_webrl.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a check on the CPU; checks that no process is left."""
    file = tmp_path / "report.json"
    code = main(["check", "gpu", "--platform", "cpu", "--json", str(file), *arguments])
    assert not [
        each for each in psutil.Process().children(recursive=True) if "checks.processes" in " ".join(each.cmdline())
    ]
    return code, json.loads(file.read_text())


def machine_with_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put an nvidia-smi on PATH that lists a GPU of driver 550, which serves no CUDA 13."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\ncase $1 in *memory*) echo 81559;; *) echo 550.54.15;; esac\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_sections_pass_on_the_cpu_and_the_report_is_complete(tmp_path: Path) -> None:
    node = tmp_path / "n1.json"
    write_json(node, [measured("n1", "link n2", 1.25, "GiB/s")])
    code, report = run(tmp_path, "--node-report", str(node))
    assert code == 0, report["summary"]
    found = {(each["section"], each["name"]): each for each in report["results"]}
    assert {section for section, _ in found} == {*SECTIONS, "installation", "roles"}
    assert not [each for each in report["results"] if each["status"] == "failed"]
    for name in (
        "logits: dense, float32, local, sdpa",
        "gradients: experts, bfloat16, local, sdpa",
        "gradients: experts, bfloat16, local, sdpa, prefix tree",
        "gradients: experts, bfloat16, local, sdpa, one expert after the other",
        "gradients: linear attention, bfloat16, local, sdpa",
        "optimizer step: dense, float32",
        "checkpoint before the first step: experts, bfloat16",
    ):
        assert found["one GPU", name]["status"] == "passed"
    for recompute in ("none", "selective", "full"):
        assert found["speed", f"arithmetic of 1024 tokens, recompute {recompute}"]["ratio"] > 0
    assert found["speed", "pass of a group of 8, 4096 tokens, as a prefix tree"]["ratio"] > 0
    assert found["speed", "pass of experts, computed together"]["ratio"] > 0
    for fault in ("a receiver killed", "a receiver stopped", "a receiver killed during creation"):
        assert "the trainer lives on: link" in found["links", f"{fault}: seconds to the error"]["note"]
    assert found["links", "a sender killed: seconds to the error"]["status"] == "passed"
    assert found["one GPU", "checkpoint of ranks' parts: experts, bfloat16"]["status"] == "passed"
    assert found["engine", "updates of a whole job"]["value"] == 3
    compared = "log-probabilities of engine and trainer"
    assert 0 < found["engine", f"{compared}: mean difference"]["value"] < 1e-4
    assert found["engine", f"{compared}: largest difference"]["value"] < 1e-3
    crossed = found["engine", "updates during an episode, at most"]
    assert crossed["value"] or crossed["status"] == "skipped"  # a busy machine may train longer than episodes take
    assert found["engine", "engines with CUDA graphs"]["value"] == 0
    assert found["engine", "parameters written in place"]["value"] > 0
    assert found["nodes", "n1: link n2"]["value"] == 1.25
    reasons = [each["note"] for each in report["results"] if each["status"] == "skipped"]
    assert reasons
    assert all(reasons)
    assert report["command"][:1] == ["webrl"]
    assert report["seconds"] > 1


def test_each_section_has_a_limit_and_leaves_no_process(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--section", "speed", "--section", "links", "--timeout-seconds", "0.5")
    assert code == 1
    assert [(each["section"], each["note"]) for each in report["results"]] == [
        (section, "it did not finish within 0.5 s (--timeout-seconds sets the limit)") for section in ("speed", "links")
    ]


def test_a_failed_node_and_an_unreadable_report_fail(tmp_path: Path) -> None:
    bad, broken = tmp_path / "n2.json", tmp_path / "n3.json"
    write_json(bad, [failed("n2", "link", "0.1 GiB/s with n1")])
    broken.write_text("{")
    code, report = run(tmp_path, "--section", "nodes", "--node-report", str(bad), "--node-report", str(broken))
    assert code == 1
    assert report["summary"].endswith("nodes: n2: link; nodes: n3")


@pytest.mark.slow
def test_a_link_below_the_least_speed_is_named(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--section", "links", "--min-link-gib-per-second", "100000")
    assert code == 1
    assert report["summary"].endswith("1 failed, 0 skipped: links: pair 0-1")


def test_a_gpu_that_torch_cannot_use_fails_the_driver_and_skips_what_computes_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_with_a_gpu(tmp_path, monkeypatch)
    file = tmp_path / "report.json"
    sections = [word for name in ("environment", "speed", "engine") for word in ("--section", name)]
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", "--json", str(file), *sections]) == 1
    report = json.loads(file.read_text())
    assert report["platform"] == "cuda"
    found = {(each["section"], each["name"]): each for each in report["results"]}
    driver = found["environment", "driver"]
    assert (driver["status"], "driver 550.54.15" in driver["note"]) == ("failed", True)
    assert {found[section, "all"]["status"] for section in ("speed", "engine")} == {"skipped"}
    assert found["speed", "all"]["note"] == driver["note"]
    assert "no GPU on this machine" not in capsys.readouterr().out


def test_a_section_alone_fails_with_a_gpu_that_torch_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine_with_a_gpu(tmp_path, monkeypatch)
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", "--section", "speed"]) == 1
    assert "driver 550.54.15" in " ".join(capsys.readouterr().out.split())


def test_the_platform_is_the_configured_one_unless_the_command_names_one(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without a GPU, as that of the tests."""
    nodes = ("--section", "nodes")
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", *nodes]) == 0
    assert "no GPU on this machine: all sections compute on its cores" in capsys.readouterr().out
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", "--section", "speed", "model.platform=cuda"]) == 1
    assert "torch sees no GPU: nvidia-smi is not installed" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", *nodes, "--platform=cpu", "model.platform=cuda"]) == 0
    assert "no GPU" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.yaml"], "none.yaml"),
        (["configs/quickstart.yaml", "--json", "/none/x.json"], "--json=/none/x.json: the folder /none does not exist"),
        (["configs/quickstart.yaml", "--timeout-seconds", "0"], "--timeout-seconds=0 must be greater than 0"),
        (["configs/quickstart.yaml", "rollout.enginess=2"], "rollout.enginess"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert main(["check", "gpu", *arguments, "--platform", "cpu"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
