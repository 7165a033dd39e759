"""Print the pins of a lock file that this Python lacks, for `pip install --no-deps`.

    python3 missing_packages.py LOCK --extras EXTRA...

An image's own packages stay as they are, unless megatron_webrl itself, which must be installed, refuses their version.
CUDA's libraries are never printed: the image has those of its torch. Exits with 1 if torch or vLLM has another version
than megatron_webrl needs: then the image is the wrong one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

FROM_THE_IMAGE = ("torch", "vllm")
CUDA_LIBRARIES = ("nvidia-", "cuda-")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print the pins of a lock file that this Python lacks.")
    parser.add_argument("lock", type=Path)
    parser.add_argument("--extras", nargs="+", required=True, help="extras of megatron_webrl that the image is for")
    parsed = parser.parse_args(arguments)
    pins = dict(line.split("==") for line in parsed.lock.read_text().split())
    refused = refused_packages(importlib.metadata.requires("megatron_webrl") or [], parsed.extras)
    wrong = [f"{name}: {reason}" for name, reason in refused.items() if name in FROM_THE_IMAGE]
    for line in wrong:
        sys.stderr.write(f"missing_packages: {line}; build on an image that has it\n")
    names = [name for name in pins if name in refused or installed_version(name) is None]
    lines = [f"{name}=={pins[name]}\n" for name in names if not name.startswith(CUDA_LIBRARIES)]
    sys.stdout.write("".join(lines))
    return int(bool(wrong))


def refused_packages(requirements: Iterable[str], extras: Iterable[str]) -> dict[str, str]:
    """Packages that are missing or of a refused version, with the reason, by normalised name."""
    refused = {}
    for requirement in map(Requirement, requirements):
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        found = installed_version(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            refused[name] = f"megatron_webrl needs {requirement.name}{requirement.specifier}, found {found or 'none'}"
    return refused


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
