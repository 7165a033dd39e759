"""`webrl check gpu` as a user runs it, on the CPU platform."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.checks.report import failed, measured, write_json
from megatron_webrl.cli import main
from megatron_webrl.launch import gpus

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and report of a check on the CPU; checks that no process is left."""
    file = tmp_path / "report.json"
    code = main(["check", "gpu", "configs/tiny_1gpu.yaml", "--platform", "cpu", "--json", str(file), *arguments])
    assert not multiprocessing.active_children()
    return code, json.loads(file.read_text())


def names(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["section"], each["name"]): each for each in report["results"]}


def test_the_environment_the_nodes_and_the_links_pass_on_the_cpu(tmp_path: Path) -> None:
    node = tmp_path / "n1.json"
    write_json(node, [measured("n1", "link n2", 1.25, "GiB/s")])
    sections = [word for name in ("environment", "nodes", "links") for word in ("--section", name)]
    code, report = run(tmp_path, "--node-report", str(node), *sections)
    assert code == 0, report["summary"]
    found = names(report)
    assert {section for section, _ in found} == {"environment", "installation", "roles", "nodes", "links"}
    assert found["nodes", "n1: link n2"]["value"] == 1.25
    assert found["links", "pair 0-1"]["value"] > found["links", "pair 0-1"]["limit"] > 0
    assert all(each["note"] for each in report["results"] if each["status"] == "skipped")


@pytest.mark.slow
def test_the_layers_of_a_model_and_a_whole_job_pass_on_the_cpu(tmp_path: Path, tiny_model: Path) -> None:
    code, report = run(tmp_path, "--section", "model", f"model.path={tiny_model}", "rollout.max_model_len=480")
    assert code == 0, report["summary"]
    found = names(report)
    assert 0 < found["model", "gradients of megatron, float32: mean error"]["value"] < 1e-4
    assert found["model", "megatron, float32: arithmetic"]["value"] > 0
    code, report = run(tmp_path, "--section", "engine", f"model.path={tiny_model}")
    assert code == 0, report["summary"]
    job = {each["name"]: each for each in report["results"]}
    assert job["updates of a whole job"]["value"] == 3
    compared = "log-probabilities of engine and trainer"
    assert 0 < job[f"{compared}: mean difference"]["value"] < 1e-4
    assert job[f"{compared}: largest difference"]["value"] < 1e-3
    crossed = job["updates during an episode, at most"]
    assert crossed["value"] or crossed["status"] == "skipped"  # a busy machine may train longer than episodes take
    assert job["parameters written in place"]["value"] > 0


def test_faults_of_links_nodes_and_models_fail_the_check_and_are_named(tmp_path: Path) -> None:
    bad, broken = tmp_path / "n2.json", tmp_path / "n3.json"
    write_json(bad, [failed("n2", "link", "0.1 GiB/s with n1")])
    broken.write_text("{")
    for arguments, summary, note in (
        (["--section", "links", "--timeout-seconds", "0.5"], "links", "0.5 s (--timeout-seconds"),
        (["--section", "model", "model.path=/nowhere"], "model", "/nowhere"),
        (["--section", "nodes", "--node-report", str(bad)], "nodes: n2: link", "0.1 GiB/s"),
        (["--section", "nodes", "--node-report", str(broken)], "nodes: n3", ""),
        (["--section", "links", "--min-link-gib-per-second", "100000"], "links: pair 0-1", "slow"),
    ):
        code, report = run(tmp_path, *arguments)
        assert code == 1
        assert summary in report["summary"]
        assert note in " ".join(each["note"] for each in report["results"] if each["status"] == "failed")


def test_a_gpu_that_torch_cannot_use_fails_the_driver_and_skips_what_computes_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.setattr(gpus, "DEVICE_FILES", (device,))
    file = tmp_path / "report.json"
    sections = [word for name in ("environment", "model", "engine") for word in ("--section", name)]
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", "--json", str(file), *sections]) == 1
    report = json.loads(file.read_text())
    assert report["platform"] == "cuda"
    found = names(report)
    driver = found["environment", "driver"]
    assert (driver["status"], "torch cannot use a GPU" in driver["note"]) == ("failed", True)
    assert {found[section, "all"]["status"] for section in ("model", "engine")} == {"skipped"}
    assert found["model", "all"]["note"] == driver["note"]
    assert "no GPU on this machine" not in capsys.readouterr().out


def test_the_platform_is_the_configured_one_unless_the_command_names_one(capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine without a GPU, as that of the tests."""
    nodes = ("--section", "nodes")
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", *nodes]) == 0
    assert "no GPU on this machine: all sections compute on its cores" in capsys.readouterr().out
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", "--section", "model", "model.platform=cuda"]) == 1
    assert "torch cannot use a GPU" in " ".join(capsys.readouterr().out.split())
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
