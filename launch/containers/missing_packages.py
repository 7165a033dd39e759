"""Print the pins of a lock file that this Python does not have, to install them with `pip install --no-deps`.

    python3 missing_packages.py LOCK

An image's own version of a package gives way, with a line on standard error: uninstall what is printed first, as some
packages share files. NVIDIA's libraries stay as they are, with a line where they differ, since torch in the image was
built with them. Exits with 1 if torch or vLLM has another version than the lock: then the image is the wrong one.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

FROM_THE_IMAGE = ("torch", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(description="Print the pins of a lock file that this Python does not have.")
    parser.add_argument("lock", type=Path)
    wrong = False
    for name, version in (line.split("==") for line in parser.parse_args().lock.read_text().split()):
        found = installed_version(name)
        if found is not None and found.partition("+")[0] == version:
            continue
        if name in FROM_THE_IMAGE:
            wrong = True
            say(f"{name} is {found or 'missing'}, the lock has {version}; build on an image that has it")
        elif name.startswith("nvidia-"):
            say(f"{name} stays {found or 'away'}, the lock has {version}")
        else:
            sys.stdout.write(f"{name}=={version}\n")
            if found is not None:
                say(f"{name} {found} becomes {version}")
    return int(wrong)


def say(line: str) -> None:
    sys.stderr.write(f"missing_packages: {line}\n")


def installed_version(name: str) -> str | None:
    """Version of an installed distribution; None if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
