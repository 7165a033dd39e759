"""`webrl check`: what is installed, and which roles can run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from megatron_webrl.checks import installation
from megatron_webrl.checks.installation import check_installation
from megatron_webrl.checks.report import CheckResult, failed, measured
from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from tests.waiting import write_program

MEGATRON_CORE = {(3, 11): "0.16.1", (3, 12): "0.19.2"}
"""The newest release for each Python."""


def test_the_stack_is_found_with_versions(tmp_path: Path):
    assert main(["check", "--json", str(tmp_path / "found.json")]) == 0
    found = {each["name"]: each for each in json.loads((tmp_path / "found.json").read_text())["results"]}
    assert found["torch"]["value"].startswith("2.13")
    assert found["megatron-core"]["value"] == MEGATRON_CORE[sys.version_info[:2]]
    assert "Chrom" in found["Chromium"]["value"]
    assert "MiB" in found["/dev/shm"]["value"]
    assert {"GPUs", "transformer-engine", "Slurm"} <= found.keys()
    assert found["NVIDIA apex"]["status"] == "skipped"  # another project on PyPI has the name
    assert (found["trainer"]["value"], found["rollout"]["value"]) == ("can run", "can run")


def test_only_the_role_that_misses_something_fails(monkeypatch: pytest.MonkeyPatch):
    broken = [
        ((), failed("installation", "apex", "faster")),
        (("rollout",), failed("installation", "playwright", "is not installed")),
    ]
    good = (("trainer", "rollout"), measured("installation", "torch", "2.13"))
    monkeypatch.setattr(installation, "_dependencies", lambda config: iter([good, *broken]))
    assert main(["check", "installation", "--role", "trainer"]) == 0
    assert main(["check", "--role", "rollout"]) == 1
    assert main(["check"]) == 1
    found = {each.name: each for each in check_installation(("trainer",))}
    assert (found["playwright"].status, found["playwright"].note) == ("skipped", "is not installed; needed by rollout")
    assert (found["apex"].status, found["rollout"].note) == ("skipped", "cannot run, missing playwright")


def test_a_version_beyond_the_pins_and_a_package_that_does_not_import_fail(monkeypatch: pytest.MonkeyPatch):
    pins = installation._requirements()["torch"][0]
    monkeypatch.setattr(installation, "_version", lambda name: "1.0")
    assert installation._package("torch", pins).note == "1.0 does not fit ==2.13.0"
    monkeypatch.setattr(installation, "_version", lambda name: "2.13.0")
    monkeypatch.setitem(installation.MODULES, "torch", "no_such_module")
    assert "2.13.0 does not import: ModuleNotFoundError" in installation._package("torch", pins).note


def test_packages_that_settings_name_are_missed(monkeypatch: pytest.MonkeyPatch):
    def names(*overrides: str) -> dict[str, CheckResult]:
        config = parse_config(None, list(overrides))
        return {result.name: result for _, result in installation._dependencies(config)}

    monkeypatch.setattr(installation, "MODULES", {})  # imported by another test
    found = names("trainer.layers=transformer_engine", "trainer.attention=flash")
    assert {found[name].status for name in ("transformer_engine", "flash_attn")} == {"failed"}
    assert "flash_attn" not in names()
    assert main(["check", "installation", "trainer.layers=local"]) == 2


def test_a_cuda_build_needs_a_compiler_with_the_headers_of_python_and_a_cpu_build_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Triton compiles its driver module in every process that computes on a GPU."""

    def found() -> tuple[tuple[str, ...], CheckResult]:
        return next((roles, each) for roles, each in installation._devices() if each.name == "C compiler, Python.h")

    assert found()[1].status == "passed"
    monkeypatch.setattr(installation.sysconfig, "get_path", lambda *_: str(tmp_path))
    assert re.search(rf"compiles no Python.h of {tmp_path} .*Python.h: No such file", found()[1].note)
    monkeypatch.setenv("CC", str(write_program(tmp_path / "cc", "echo no licence >&2; exit 1")))
    assert found()[1].note.endswith("as Triton must: no licence")
    monkeypatch.setenv("CC", "/none/cc")
    assert "/none/cc does not run" in found()[1].note
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install gcc or clang, or set CC" in found()[1].note
    for cuda, roles in ((None, ()), ("13.0", installation.ROLES)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert found()[0] == roles


def test_an_old_glibc_and_another_c_library_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installation, "_requirements", dict)
    for library, status in ((("glibc", "2.31"), "passed"), (("glibc", "2.28"), "failed"), (("", ""), "failed")):
        monkeypatch.setattr(installation.platform, "libc_ver", lambda library=library: library)
        found = {each.name: (roles, each) for roles, each in installation._dependencies(None)}["glibc"]
        assert (found[0], found[1].status) == (("rollout",), status), library
        assert found[1].value == library[1] if status == "passed" else "is below 2.31" in found[1].note
