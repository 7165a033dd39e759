"""Who may import whom: docs/architecture.md, kept by reading the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_webrl"
FILES = sorted(PACKAGE.rglob("*.py"))

BOTTOM = {"__version__", "config", "config_checks", "control", "evaluations", "processes", "stacks", "types", "compat"}
MAY_IMPORT = {
    "trainer": {"weights", "model", "ring", "tracking", "sampling"},
    "rollout": {"judge", "browser", "farm", "tasks", "weights", "model", "ring", "sampling", "placement"},
    "judge": set(),
    "browser": set(),
    "farm": {"browser", "tasks", "judge"},
    "tasks": {"sampling"},
    "sampling": set(),
    "weights": {"model"},
    "model": set(),
    "ring": set(),
    "tracking": set(),
    "node": {
        "roles",
        "falls",
        "hangs",
        "revival",
        "placement",
        "placement_cores",
        "placement_page",
        "config_checks",
        "config_layout",
        "config_site",
        "browser",
        "farm",
        "ring",
        "status",
        "tracking",
    },
    "status": {"placement", "placement_cores", "ring", "tracking"},
    "parity": {"trainer", "rollout", "model"},
}
ONLY = {
    "vllm": {
        "weights/vllm_target.py",
        "weights/vllm_worker.py",
        "weights/vllm_scheduler.py",
        "rollout/engine/vllm_engine.py",
        "rollout/engine/vllm_environment.py",
        "parity/vllm_scores.py",
    },
    "megatron": {"model", "trainer", "weights", "parity/megatron_scores.py"},
}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_module_imports_only_what_lies_below_it(path: Path):
    place = path.relative_to(PACKAGE)
    part = place.parts[0]
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "megatron_webrl" and rest and part in MAY_IMPORT:
            assert rest[0] == part or rest[0] in BOTTOM | MAY_IMPORT[part], f"{place} imports {name}"
        if top in ONLY:
            assert str(place) in ONLY[top] or part in ONLY[top], f"{place} imports {name}"


def test_what_both_roles_use_of_the_model_needs_no_megatron():
    assert not [name for name in imports(PACKAGE / "model" / "processing.py") if name.startswith("megatron.")]


def test_the_weights_take_of_the_model_only_what_needs_no_megatron():
    data = {"megatron_webrl.model.parameter_map", "megatron_webrl.model.layout"}
    for path in (PACKAGE / "weights").glob("*.py"):
        modules = {".".join(name.split(".")[:3]) for name in imports(path) if name.startswith("megatron_webrl.model")}
        assert modules - {"megatron_webrl.model"} <= data, path
    for name in ("parameter_map", "layout"):
        assert not [found for found in imports(PACKAGE / "model" / f"{name}.py") if found.startswith("megatron.")]


def test_what_starts_the_processes_of_a_node_imports_torch_only_where_something_failed():
    code = "import sys, megatron_webrl.slurm.node_supervisor, megatron_webrl.slurm.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, check=False).returncode == 0


def test_the_types_import_nothing_of_ours():
    assert not [name for name in imports(PACKAGE / "types.py") if name.startswith("megatron_webrl")]
