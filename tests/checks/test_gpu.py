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
MODEL = f"model.path={ROOT / 'models' / 'quickstart'}"


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
def test_environment_and_links_pass_on_the_cpu(tmp_path: Path) -> None:
    code, report = run(tmp_path, "--section", "environment", "--section", "links")
    assert code == 0, report["summary"]
    found = names(report)
    assert {section for section, _ in found} == {"environment", "installation", "roles", "links"}
    assert found["links", "pair 0-1"]["value"] > found["links", "pair 0-1"]["limit"] > 0
    assert all(each["note"] for each in report["results"] if each["status"] == "skipped")
    assert report["meaning"].startswith("A pass means: packages, driver and limits fit; processes of this machine")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_short_job_survives_a_killed_rank_on_the_cpu(tmp_path: Path) -> None:
    """With pages of 1280 x 768 and responses of 500 tokens; only a whole job shows that it resumes and evaluates."""
    code, report = run(tmp_path, "--section", "job", MODEL, f"run.directory={tmp_path}")
    assert code == 0, report["summary"]
    found = {each["name"]: each for each in report["results"]}
    compared = "log-probabilities of engine and trainer"
    assert 0 < found[f"{compared}: mean difference"]["value"] < 1e-4
    assert found[f"{compared}: largest difference"]["value"] < 1e-3
    assert found["size of a screenshot"]["value"] == "1280 x 768"
    values = {
        "updates of a whole job": 5, "restarts after trainer-0 was killed": 1, "starts from a checkpoint": 1,
        "evaluated episodes with a verdict": 3, "longest response": 500,
    }  # fmt: skip
    assert values == {name: found[name]["value"] for name in values}
    assert found["updates during an episode, at most"]["value"] >= 1
    assert {"checkpoint", "free space for checkpoints", "episodes that are accounted for"} <= found.keys()
    assert not list((tmp_path / "tiny_1gpu-check").glob("checkpoints/*"))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_quick_check_trains_two_random_layers(tmp_path: Path) -> None:
    sections = ("--quick", "--section", "model", "--section", "job")
    code, report = run(tmp_path, *sections, MODEL, f"run.directory={tmp_path}")
    assert code == 0, report["summary"]
    found = names(report)
    assert found["job", "updates of a whole job"]["value"] == 3
    assert ("job", "checkpoint") not in found
    assert report["quick"]


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
    sections = ("environment", "model", "job")
    request = GpuCheckRequest(parse_config(None), "cuda", sections, "no driver", timeout_seconds=0.1)
    assert next(check_environment(request)) == failed("environment", "driver", "no driver")
    console = Console(file=io.StringIO())
    assert check_gpu(request, console)[-2:] == [skipped(name, "all", "no driver") for name in ("model", "job")]
    alone = check_gpu(replace(request, sections=("model",)), console)
    assert alone == [failed("model", "all", "no driver")]


def test_bad_input_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (latin := tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    (empty := tmp_path / "empty.json").write_text("{}")
    gpu, quickstart = ["gpu", "--platform", "cpu"], "configs/quickstart.yaml"
    for arguments, says in (
        ([*gpu, "none.yaml"], "none.yaml"),
        ([*gpu, str(latin)], "latin.yaml is not valid YAML"),
        ([*gpu, quickstart, "--json", "/none/x.json"], "--json=/none/x.json: the folder /none does not exist"),
        ([*gpu, quickstart, "--json", str(tmp_path)], "is a folder"),
        ([*gpu, quickstart, "--job-file", "/none/x"], "--job-file=/none/x: the folder /none does not exist"),
        ([*gpu, quickstart, "--min-link-gib-per-second=-3"], "--min-link-gib-per-second=-3 must be at least 0"),
        ([*gpu, quickstart, "--timeout-seconds", "0"], "--timeout-seconds=0 must be greater than 0"),
        ([*gpu, quickstart, "rollout.enginess=2"], "rollout.enginess"),
        (["job", quickstart, str(empty)], "empty.json is not a report of `webrl check gpu --json`: KeyError"),
        (["job", quickstart, "none.json"], "none.json is not a report"),
    ):
        assert main(["check", *arguments]) == 2
        error = capsys.readouterr().err
        assert says in error
        assert error.count("\n") == 1
