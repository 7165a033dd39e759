"""The structure that docs/architecture.md describes, checked by reading the code."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatron_webrl"
FILES = sorted(PACKAGE.rglob("*.py"))
LAYERS = (
    {"__main__"},
    {"cli"},
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
        "weights/vllm_experts.py",
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


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, inside functions too."""
    return names_of(ast.walk(ast.parse(path.read_text())))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A circle for each edge of the graph that closes one, found by depth-first search."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def test_no_modules_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {module_name(path): set() for path in FILES}
    for path in FILES:
        name = module_name(path)
        graph[name] = {other for other in imported_names(path) if other in graph} - {name, "megatron_webrl"}
    assert not [" -> ".join(circle) for circle in circles(graph)]


def test_the_search_for_circles_finds_them():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(graph) == [["a", "b", "c", "a"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


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
    modules = "megatron_webrl.launch.node, megatron_webrl.launch.local, megatron_webrl.launch.slurm.prepare"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
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
                waiting.extend(names_of(ast.parse(files[name].read_text()).body))
        assert len(seen) > 30, role


def test_the_root_of_the_package_holds_a_few_modules():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "cli.py", "types.py"}
    assert not [name for name in imported_names(PACKAGE / "types.py") if name.startswith("megatron_webrl")]


def renaming_modules() -> set[str]:
    """Modules of the package that rename a file or folder: PATH.rename(X), PATH.replace(X), os.rename(X, Y)."""
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.keywords:
                continue
            module = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            name, count = node.func.attr, 2 if module == "os" else 1
            if name in ("rename", "replace") and len(node.args) == count:
                found.add(str(path.relative_to(PACKAGE)))
    return found


def test_state_files_are_written_by_one_module():
    assert renaming_modules() == {
        "util/atomic_file.py",
        "model/convert/atomic_folder.py",  # keeps the old folder until the new one is in place
        "launch/run_folder.py",  # an earlier run's folder
        "trainer/checkpoint/checkpoint_files.py",  # a checkpoint that is deleted
        "control/child_process.py",  # a log that has become long
        "track/run_lock.py",  # the staging folder of an earlier launch
        "track/timeline.py",  # a timeline that has become long
    }


GROUP_CONSTRUCTORS = {"init_process_group", "ProcessGroupGloo", "ProcessGroupNCCL"}


def stores_of_process_groups(text: str) -> list[str]:
    """The expression that each process group formed in a file has as its store; empty for an init_method."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in GROUP_CONSTRUCTORS:
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            by_name = "init_process_group" in ast.unparse(node.func)
            found.append(named.get("store", "") if by_name else ast.unparse(node.args[0]))
    return found


def test_no_process_group_is_formed_over_the_control_services_store():
    # A failed NCCL group sets a key of its store that ends every process of every group on that store.
    stores = {str(p.relative_to(PACKAGE)): stores_of_process_groups(p.read_text()) for p in FILES}
    assert {path: found for path, found in stores.items() if found} == {
        "checks/model_scores.py": [""],
        "checks/network.py": ["store", "store"],  # of the check alone, on node 0
        "trainer/parallel.py": ["_attempt_store(config, rank, control, attempt)"],
        "weights/link.py": ["store", "own"],  # of the link alone, on its rank 0
    }
    assert stores_of_process_groups("dist.init_process_group('gloo', store=control.store)") == ["control.store"]
