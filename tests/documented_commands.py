"""The environment in which commands of the documentation run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def command_environment() -> dict[str, str]:
    """Environment variables with which `python` and `webrl` are those of the tests, and the package this checkout's."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
