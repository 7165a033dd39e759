"""What Python source uses of a package: imported names, their attributes, and keyword arguments of their calls."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

Uses = dict[str, list[str]]  # full name, such as vllm.config.VllmConfig -> keyword arguments that calls give it


def find_uses(sources: Iterable[str], package: str) -> Uses:
    """Full names of what the sources import from a package, and of attributes of imported names. Sorted.

    Methods of objects are not among them: source does not say of which class an object is.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for source in sources:
        if package in source:
            _find_in(ast.parse(source), package, found)
    return {name: sorted(found[name]) for name in sorted(found)}


def _find_in(tree: ast.Module, package: str, found: defaultdict[str, set[str]]) -> None:
    names = _imported(tree, package)
    for name in names.values():
        if name != package:
            _ = found[name]
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}

    def full_name(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name) and node.id not in assigned:
            return names.get(node.id)
        if isinstance(node, ast.Attribute) and (owner := full_name(node.value)) is not None:
            return f"{owner}.{node.attr}"
        return None

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (attribute := full_name(node)) is not None:
            _ = found[attribute]
        if isinstance(node, ast.Call) and (called := full_name(node.func)) is not None:
            found[called] |= {keyword.arg for keyword in node.keywords if keyword.arg is not None}


def _imported(tree: ast.Module, package: str) -> dict[str, str]:
    """Local name -> full name of everything that the file imports from a package, at any place."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").split(".")[0] == package:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    names[alias.asname or package] = alias.name if alias.asname else package
    return names
