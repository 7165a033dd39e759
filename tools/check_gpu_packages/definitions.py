"""What the Python files of a package define, read from its wheel and never imported."""

from __future__ import annotations

import ast
import zipfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tools.check_gpu_packages.uses import Uses

ANY = "**"  # among keyword arguments: any is accepted
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def python_files(wheel: Path) -> dict[str, str]:
    """Path -> source of every Python file of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist() if name.endswith(".py")}


class Definitions:
    """Names that the files of a package define. `files`: path -> source."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._tree = cache(self._parse)

    def missing(self, uses: Uses) -> list[str]:
        """The uses that the package does not have: full names, or "name(keyword)" for an unknown argument."""
        lacking: list[str] = []
        for name, keywords in uses.items():
            found = self._find(name)
            if found is None:
                lacking.append(name)
                continue
            accepted = self._keywords(*found) if keywords else set()
            lacking += [f"{name}({keyword})" for keyword in keywords if keyword not in accepted and ANY not in accepted]
        return lacking

    def _parse(self, module: str) -> ast.Module | None:
        path = module.replace(".", "/")
        source = self._files.get(f"{path}.py", self._files.get(f"{path}/__init__.py"))
        return None if source is None else ast.parse(source)

    def _find(self, name: str) -> tuple[str, ast.AST] | None:
        """Module and node of a full name; the node of a module is its tree."""
        if (tree := self._tree(name)) is not None:
            return name, tree
        owner, _, last = name.rpartition(".")
        if not owner or (found := self._find(owner)) is None:
            return None
        module, node = found
        if isinstance(node, ast.Module):
            return self._find_in_module(module, node, last)
        if isinstance(node, ast.ClassDef):
            return self._find_in_class(module, node, last)
        return found  # an attribute of a value: source does not say what it is

    def _find_in_module(self, module: str, tree: ast.Module, name: str) -> tuple[str, ast.AST] | None:
        package = module if f"{module.replace('.', '/')}/__init__.py" in self._files else module.rpartition(".")[0]
        for node in reversed(list(ast.walk(tree))):  # the last definition is that of `try: ... except ImportError:`
            if isinstance(node, _Definition) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                return module, node
            if isinstance(node, ast.ImportFrom):
                origin = _absolute(node, package)
                for alias in node.names:
                    if (alias.asname or alias.name) == name and origin != module:
                        return self._find(f"{origin}.{alias.name}") or (module, node)
                    if alias.name == "*" and (found := self._find(f"{origin}.{name}")) is not None:
                        return found
            if isinstance(node, ast.Dict) and (lazy := _lazy_import(node, name)):
                return self._find(f"{module}.{lazy}" if not lazy.startswith(module) else lazy)
        return None

    def _find_in_class(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST] | None:
        for part in ast.walk(node):
            if isinstance(part, _Definition) and part.name == name:
                return module, part
            if isinstance(part, ast.Assign | ast.AnnAssign) and name in _targets(part):
                return module, part
        for base in self._bases(module, node):
            if (found := self._find_in_class(*base, name)) is not None:
                return found
        return None

    def _bases(self, module: str, node: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        found = [self._find(f"{module}.{ast.unparse(base).partition('[')[0]}") for base in node.bases]
        return [(owner, base) for owner, base in filter(None, found) if isinstance(base, ast.ClassDef)]

    def _keywords(self, module: str, node: ast.AST) -> set[str]:
        """Keyword arguments that a call accepts; ANY if source does not say."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            return {each.arg for each in (*arguments.args, *arguments.kwonlyargs)} | (
                {ANY} if arguments.kwarg else set()
            )
        if not isinstance(node, ast.ClassDef):
            return {ANY}
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return self._keywords(module, part)
        fields = {name for part in node.body if isinstance(part, ast.AnnAssign) for name in _targets(part)}
        bases = self._bases(module, node)
        unknown = {ANY} if not fields and not bases else set()
        return fields.union(unknown, *(self._keywords(*base) for base in bases))


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {part.id if isinstance(part, ast.Name) else part.attr for target in targets for part in ast.walk(target)
            if isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store)}  # fmt: skip


def _absolute(node: ast.ImportFrom, package: str) -> str:
    """The module that an import names, within `package`."""
    if not node.level:
        return node.module or ""
    parent = package.split(".")
    return ".".join([*parent[: len(parent) - node.level + 1], *filter(None, [node.module])])


def _lazy_import(node: ast.Dict, name: str) -> str | None:
    """The entry {"Name": ".module:Name"} of a module that imports on demand, as "module.Name"."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == name and isinstance(value, ast.Constant):
            return str(value.value).lstrip(".").replace(":", ".")
    return None
