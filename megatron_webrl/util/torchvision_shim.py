"""Import shim: use a CPU build of PyTorch with CUDA builds of torchvision, torchaudio and torchcodec.

A torchvision built for CUDA cannot load its library into a CPU build of PyTorch, and its import fails because
`torchvision::nms` was never declared. torchaudio and torchcodec fail in the same way. None of their operators is used
here, so it is enough to declare two schemas of torchvision and to hide the other packages. `install` adds an import
hook and reads two small files; it imports nothing heavy.
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

SITECUSTOMIZE_FOLDER = Path(__file__).with_name("_site")  # for a subprocess's PYTHONPATH: installs the same shim
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[Any] = []  # a garbage-collected torch.library.Library removes its declarations


class _SchemaHook(importlib.abc.MetaPathFinder):
    """Declares torchvision's schemas just before its extension is imported; finds no module itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        # Not at "torchvision": libraries look up the package without importing it, which must not load torch.
        if fullname == "torchvision.extension":
            declare_torchvision_schemas()
        return None


def install() -> None:
    """Install the hook in this process. Cheap and idempotent; does nothing where the builds match."""
    if any(isinstance(finder, _SchemaHook) for finder in sys.meta_path):
        return
    if _is_cuda_build("torch") is not False:
        return
    if _is_cuda_build("torchvision"):
        sys.meta_path.insert(0, _SchemaHook())
    for name in ("torchaudio", "torchcodec"):
        if name not in sys.modules and _is_cuda_build(name):
            sys.modules[name] = None  # type: ignore[assignment]  # import and find_spec both report it missing


def declare_torchvision_schemas() -> None:
    """Declare the operators for which torchvision registers shapes at import, unless they exist."""
    import torch

    missing = [name for name in _SCHEMAS if not hasattr(torch.ops.torchvision, name)]
    if not missing:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in missing:
        library.define(_SCHEMAS[name])
    _libraries.append(library)


def _is_cuda_build(package: str) -> bool | None:
    """Whether <package>/version.py names a CUDA version, without importing the package; None if it is missing."""
    spec = None if sys.modules.get(package, ...) is None else importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text() if file.is_file() else ""
    version = re.search(r"__version__ = '[^']*\+(cu|cpu)|^cuda\b[^=\n]*= '", text, re.MULTILINE)
    return version is not None and version.group(1) != "cpu"
