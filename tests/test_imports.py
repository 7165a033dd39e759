"""The structure that docs/architecture.md describes, checked by reading the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_webrl"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = (
    {"__main__"},
    {"cli", "api"},
    {"checks"},
    {"launch"},
    {"monitor"},
    {"trainer", "rollout"},
    {"browser"},
    {"tasks", "judge"},
    {"weights", "placement", "track"},
    {"model"},
    {"ring"},
    {"control"},
    {"config"},
    {"util", "types"},
)
"""From top to bottom. A module imports from its own package and from the layers below it."""
ONLY = {
    "vllm": {
        "weights/vllm_worker.py",
        "weights/vllm_target.py",
        "weights/vllm_scheduler.py",
        "rollout/engine",
        "checks/model_scores.py",
    },
    "megatron": {"model", "trainer", "weights", "checks/model_scores.py"},
}


def names_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names that these nodes themselves import; of `from a import b` both `a` and `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imported_names(path: Path) -> list[str]:
    """Dotted names that a file imports, inside functions too."""
    return list(names_of(nodes_of(path)))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_no_modules_import_each_other_in_a_circle():
    modules = {module_name(path): path for path in FILES}
    TopologicalSorter(
        {
            name: {other for other in imported_names(path) if other in modules} - {name, "megatron_webrl"}
            for name, path in modules.items()
        }
    ).prepare()  # raises CycleError with a circle


def test_every_package_has_a_layer():
    packages = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__"}
    assert packages == set().union(*LAYERS)


def test_modules_import_only_from_the_layers_below():
    for path in FILES:
        place = path.relative_to(PACKAGE)
        package = place.parts[0].removesuffix(".py")
        depth = next((number for number, layer in enumerate(LAYERS) if package in layer), -1)
        below = set().union(*LAYERS[depth + 1 :])
        for name in imported_names(path):
            top, *rest = name.split(".")
            if top == "megatron_webrl" and rest and rest[0] != "__version__":
                assert rest[0] == package or rest[0] in below, f"{place} imports {name}"
            if top in ONLY:
                assert any(place.is_relative_to(allowed) for allowed in ONLY[top]), f"{place} imports {name}"


def test_weight_transfer_takes_only_pure_data_from_the_model():
    """Those modules, and the model inputs that both roles prepare, work without Megatron."""
    pure = {f"megatron_webrl.model.{name}" for name in ("architectures", "parameter_map", "layout")}
    for path in (PACKAGE / "weights").glob("*.py"):
        used = {name for name in imported_names(path) if name.startswith("megatron_webrl.model.")}
        assert {".".join(name.split(".")[:3]) for name in used} <= pure, path
    maps = (f"{folder}/parameters" for folder in ("qwen3_5", "qwen3_vl", "vision_language"))
    for name in ("architectures", "parameter_map", "layout", "processor", *maps):
        assert not [each for each in imported_names(PACKAGE / "model" / f"{name}.py") if each.startswith("megatron.")]


def test_a_node_starts_without_torch():
    modules = [f"megatron_webrl.launch.{name}" for name in ("evaluation", "local", "node", "slurm.prepare")]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_roles_import_vllm_neither_as_a_trainer_nor_before_their_environment_is_set():
    """Followed from the body of each role through what modules import as soon as they are imported."""
    files = {module_name(path): path for path in FILES}
    functions = {
        node.name: node
        for node in ast.parse((PACKAGE / "launch" / "role.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    for role, first in (("_run_rank", "trainer.main"), ("_run_rollout", "rollout.engine.followers")):
        waiting, seen = list(names_of(functions[role].body)), set[str]()
        assert f"megatron_webrl.{first}" in waiting, role
        while waiting:
            name = waiting.pop()
            assert name.partition(".")[0] != "vllm", (role, sorted(seen))
            if name in files and name not in seen:
                seen.add(name)
                waiting.extend(names_of(nodes_of(files[name])[0].body))  # type: ignore[attr-defined]
        assert len(seen) > 30, role


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """File of the package, dotted name of the function, and node of each call."""
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.Call):
                yield str(path.relative_to(PACKAGE)), ast.unparse(node.func), node


def test_no_process_group_is_formed_over_the_control_services_store():
    # A failed NCCL group sets a key of its store that ends every process of every group on that store.
    stores: dict[str, list[str]] = {}
    for path, name, node in calls():
        kind = name.rpartition(".")[2]
        if kind in ("init_process_group", "ProcessGroupGloo", "ProcessGroupNCCL"):
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            by_name = kind == "init_process_group"
            stores.setdefault(path, []).append(named.get("store", "") if by_name else ast.unparse(node.args[0]))
    assert stores == {
        "checks/model_scores.py": [""],  # an init_method
        "checks/network.py": ["store", "store"],  # of the check alone, on node 0
        "trainer/parallel.py": ["_attempt_store(config, rank, control, attempt)"],
        "weights/link.py": ["store", "own"],  # of the link alone, on its rank 0
    }
