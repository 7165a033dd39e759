"""`webrl check gpu` as a user runs it, on the CPU platform."""

from __future__ import annotations

import io
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_webrl.checks.gpu import check_environment, check_gpu, choose_platform
from megatron_webrl.checks.network import check_links
from megatron_webrl.checks.report import GpuCheckRequest, failed, measured, skipped, write_json
from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
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


@pytest.mark.slow
def test_all_sections_pass_on_the_cpu(tmp_path: Path, tiny_model: Path) -> None:
    code, report = run(tmp_path, "--section", "environment", "--section", "links")
    assert code == 0, report["summary"]
    found = names(report)
    assert {section for section, _ in found} == {"environment", "installation", "roles", "links"}
    assert found["links", "pair 0-1"]["value"] > found["links", "pair 0-1"]["limit"] > 0
    assert all(each["note"] for each in report["results"] if each["status"] == "skipped")
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


def test_reports_of_nodes_are_part_of_the_check_and_faults_fail_it_by_name(tmp_path: Path) -> None:
    good, bad, broken = tmp_path / "n1.json", tmp_path / "n2.json", tmp_path / "n3.json"
    write_json(good, [measured("n1", "link n2", 1.25, "GiB/s")])
    write_json(bad, [failed("n2", "link", "0.1 GiB/s with n1")])
    broken.write_text("{")
    code, report = run(tmp_path, "--section", "nodes", "--node-report", str(good))
    assert (code, names(report)["nodes", "n1: link n2"]["value"]) == (0, 1.25)
    reports = [f"--node-report={file}" for file in (bad, broken)]
    for arguments, faults in (
        (["--section=links", "--timeout-seconds=0.5"], {"links: its process": "0.5 s (--timeout-seconds"}),
        (["--section=model", "model.path=/nowhere"], {"model: ": "/nowhere"}),
        (["--section=nodes", *reports], {"nodes: n2: link": "0.1 GiB/s", "nodes: n3": str(broken)}),
    ):
        code, report = run(tmp_path, *arguments)
        assert code == 1
        notes = " ".join(each["note"] for each in report["results"] if each["status"] == "failed")
        for name, note in faults.items():
            assert name in report["summary"]
            assert note in notes


def test_a_slow_link_fails() -> None:
    request = GpuCheckRequest(parse_config(None), "cpu", ("links",), min_link_gib_per_second=1e5)
    [pair] = check_links(request)
    assert (pair.name, pair.status, pair.limit) == ("pair 0-1", "failed", 1e5)
    assert 0 < pair.value < 1e5
    [pair] = check_links(replace(request, min_link_gib_per_second=0.0))
    assert (pair.status, pair.limit) == ("passed", pytest.approx(pair.value / 2, rel=1e-2))


def test_the_platform_is_the_configured_one_unless_the_command_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without a GPU, as that of the tests."""
    nodes = ("--section", "nodes")
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", *nodes]) == 0
    assert "no GPU on this machine: all sections compute on its cores" in capsys.readouterr().out
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", *nodes, "--platform=cpu", "model.platform=cuda"]) == 0
    assert "no GPU" not in capsys.readouterr().out
    assert main(["check", "gpu", "configs/tiny_1gpu.yaml", "--section", "model", "model.platform=cuda"]) == 1
    assert "torch cannot use a GPU" in " ".join(capsys.readouterr().out.split())
    device = tmp_path / "nvidiactl"
    device.touch()
    monkeypatch.setattr(gpus, "DEVICE_FILES", (device,))
    for asked, problem, platform in (("auto", "", "cuda"), ("auto", "no driver", "cuda"), ("cpu", "no driver", "cpu")):
        monkeypatch.setattr(gpus, "find_cuda_problem", lambda problem=problem: problem)
        assert choose_platform(asked) == (platform, problem if platform == "cuda" else ""), (asked, problem)


def test_a_gpu_that_torch_cannot_use_fails_the_driver_and_skips_what_computes_on_it() -> None:
    sections = ("environment", "model", "engine")
    request = GpuCheckRequest(parse_config(None), "cuda", sections, "no driver", timeout_seconds=0.1)
    assert next(check_environment(request)) == failed("environment", "driver", "no driver")
    console = Console(file=io.StringIO())
    assert check_gpu(request, console)[-2:] == [skipped(name, "all", "no driver") for name in ("model", "engine")]
    alone = check_gpu(replace(request, sections=("model",)), console)
    assert alone == [failed("model", "all", "no driver")]


def test_bad_input_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, says in (
        (["none.yaml"], "none.yaml"),
        (["configs/quickstart.yaml", "--json", "/none/x.json"], "--json=/none/x.json: the folder /none does not exist"),
        (["configs/quickstart.yaml", "--timeout-seconds", "0"], "--timeout-seconds=0 must be greater than 0"),
        (["configs/quickstart.yaml", "rollout.enginess=2"], "rollout.enginess"),
    ):
        assert main(["check", "gpu", *arguments, "--platform", "cpu"]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
