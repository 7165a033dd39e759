"""A GPU that computes nothing: packages built for CUDA import and configure themselves as on the card that it names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TRITON_SYMBOLS = (
    "cuCtxGetLimit", "cuCtxSetLimit", "cuDriverGetVersion", "cuFuncGetAttribute", "cuFuncSetCacheConfig",
)  # fmt: skip
"""Of libcuda, needed by the module that Triton compiles when it is first used, beside those of the wheels."""


@dataclass(frozen=True)
class Card:
    """What libraries ask of a card."""

    name: str
    capability: int  # 90: 9.0
    gib: int
    processors: int  # streaming multiprocessors
    shared_memory_kib: int  # of a block, at most


CARDS = {
    "A100": Card("NVIDIA A100-SXM4-80GB", 80, 80, 108, 163),
    "H100": Card("NVIDIA H100 80GB HBM3", 90, 80, 132, 227),
    "H200": Card("NVIDIA H200", 90, 141, 132, 227),
    "B200": Card("NVIDIA B200", 100, 180, 148, 227),
}
GPUS = 8


def build_driver(site_packages: Path, folder: Path) -> Path:
    """Compile the libraries for the wheels of an environment; returns their folder.

    Raises FileNotFoundError: there is no C compiler, CalledProcessError.
    """
    symbols = set(TRITON_SYMBOLS)
    for library in (each for each in site_packages.rglob("*.so*") if each.is_file()):
        if b"libcuda.so.1" in library.read_bytes():
            symbols |= set(re.findall(r" U (cu[A-Z]\w*)", _run("nm", "-D", "--undefined-only", str(library))))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "symbols.h").write_text("".join(f"NO_DEVICE({name})\n" for name in sorted(symbols)))
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    source = Path(__file__).with_name("driver.c")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        _run(compiler, "-shared", "-fPIC", f"-I{folder}", f"-Wl,-soname,{name}", str(source), "-o", str(folder / name))
    return folder


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def environment(driver: Path, card: Card) -> dict[str, str]:
    """Variables of a process that sees GPUS of a card."""
    return {
        "LD_LIBRARY_PATH": str(driver),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "FAKE_GPU_COUNT": str(GPUS),
        "FAKE_GPU_NAME": card.name,
        "FAKE_GPU_CAPABILITY": str(card.capability),
        "FAKE_GPU_BYTES": str(card.gib * 2**30),
    }


def install(card: Card) -> None:
    """Let torch.cuda of this process, which has the variables of `environment`, describe the card."""
    import torch

    major, minor, size = card.capability // 10, card.capability % 10, card.gib * 2**30
    properties = SimpleNamespace(
        name=card.name, major=major, minor=minor, total_memory=size, multi_processor_count=card.processors,
        is_integrated=0, warp_size=32, shared_memory_per_block_optin=card.shared_memory_kib * 2**10,
    )  # fmt: skip
    answers: Mapping[str, Any] = {
        "_lazy_init": None, "set_device": None, "current_device": 0, "get_device_name": card.name,
        "get_device_capability": (major, minor), "get_device_properties": properties, "mem_get_info": (size, size),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, type(name, (), {"__init__": lambda *_, **__: None}))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(GPUS))))


@contextmanager
def on_meta() -> Iterator[None]:
    """Context in which every new tensor is on the meta device, those that ask for a GPU, too."""
    import torch
    from torch.overrides import TorchFunctionMode

    class ToMeta(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            device = (kwargs or {}).get("device")
            if isinstance(device, int) or str(device).startswith("cuda"):
                kwargs["device"] = torch.device("meta")
            return func(*args, **(kwargs or {}))

    with torch.device("meta"), ToMeta():
        yield
