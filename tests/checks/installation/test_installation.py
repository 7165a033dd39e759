from __future__ import annotations

import json
import sys

import pytest

from megatron_webrl.checks.installation import installation
from megatron_webrl.checks.installation.installation import Dependency
from megatron_webrl.cli import main

MEGATRON_CORE = {(3, 11): "0.16.1", (3, 12): "0.19.2"}
"""The newest release for each Python."""


def test_doctor_finds_the_stack_with_versions(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    found = {part["name"]: part["found"] for part in json.loads(capsys.readouterr().out)["dependencies"]}
    assert found["torch"].startswith("2.13")
    assert found["megatron-core"] == MEGATRON_CORE[sys.version_info[:2]]
    assert "Chrom" in found["Chromium"]
    assert "MiB" in found["/dev/shm"]
    assert {"CUDA", "NVIDIA apex", "transformer-engine", "Slurm"} <= found.keys()


def test_doctor_fails_for_the_role_that_misses_something(monkeypatch: pytest.MonkeyPatch):
    parts = [Dependency("torch", "2.13", ("trainer", "rollout")), Dependency("playwright", None, ("rollout",))]
    monkeypatch.setattr(installation, "find_dependencies", lambda: parts)
    assert main(["doctor", "--role", "trainer"]) == 0
    assert main(["doctor", "--role", "rollout"]) == 1
    assert main(["doctor"]) == 1


def test_another_apex_is_not_nvidias():
    finding = next(f for f in installation.find_dependencies() if f.name == "NVIDIA apex")
    assert finding.found is None
    assert finding.needed_by == ()
