"""Lets CPU builds of PyTorch live beside CUDA builds of its companion packages.

A torchvision wheel built for CUDA cannot load its library beside a CPU build of PyTorch; importing it then
fails because `torchvision::nms` was never declared. torchaudio and torchcodec built for CUDA fail the same
way. None of their operators is used here, so declaring the two schemas, or hiding the package, is enough.
`install` puts a hook in front of the import system and reads two small files; nothing heavy is imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

SITECUSTOMIZE_FOLDER = Path(__file__).with_name("_site")
"""Holds a sitecustomize that gives a Python subprocess the same cure; goes to the front of PYTHONPATH."""

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[Any] = []  # a torch.library.Library takes its declarations back when it is collected


class _Declaring(importlib.abc.MetaPathFinder):
    """Declares torchvision's schemas just before torchvision itself is looked for, then steps aside."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Not at "torchvision": libraries look for the package without importing it, and that must not load torch.
        if fullname == "torchvision.extension":
            declare_torchvision_schemas()
        return None


def install() -> None:
    """Cure the imports of this process. Cheap, idempotent, and without effect where nothing is wrong."""
    if any(isinstance(finder, _Declaring) for finder in sys.meta_path):
        return
    if _version("torch") is None or _built_for_cuda("torch"):
        return
    if _built_for_cuda("torchvision"):
        sys.meta_path.insert(0, _Declaring())
    for name in ("torchaudio", "torchcodec"):
        if name not in sys.modules and _built_for_cuda(name):
            sys.modules[name] = None  # type: ignore[assignment]  # import and find_spec both say: not there


def declare_torchvision_schemas() -> None:
    """Declare the operators for which torchvision registers shapes at import, unless they are there."""
    import torch

    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(_SCHEMAS[name])
    _libraries.append(library)


def _built_for_cuda(package: str) -> bool:
    version = _version(package)
    return version is not None and "+cpu" not in version and ("+cu" in version or "cuda=" in version)


def _version(package: str) -> str | None:
    """What <package>/version.py says of version and CUDA, without importing the package; None if absent."""
    if sys.modules.get(package, ...) is None:
        return None
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    if not file.is_file():
        return ""
    text = file.read_text()
    version = re.search(r"__version__ = '([^']*)'", text)
    cuda = re.search(r"^cuda\b[^=\n]*= '([^']*)'", text, re.MULTILINE)
    return (version.group(1) if version else "") + (" cuda=" + cuda.group(1) if cuda else "")
