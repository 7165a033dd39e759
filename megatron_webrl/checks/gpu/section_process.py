"""Process of one section: writes a JSON line for each result, so that those of a process that dies are kept."""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

from megatron_webrl.checks.gpu.request import GpuCheckRequest

RESULTS_FILE = "results.jsonl"
MODULES = {
    "environment": "environment_section",
    "one GPU": "model_section",
    "speed": "speed_section",
    "links": "link_section",
    "engine": "engine_section",
    "nodes": "nodes_section",
}


def main(folder: Path, section: str) -> None:
    """Run a section; its results go to RESULTS_FILE in `folder`, which also holds the request."""
    request = GpuCheckRequest.load(folder)
    tempfile.tempdir = str(folder)  # which the parent removes, also if this process is killed
    module = importlib.import_module(f"megatron_webrl.checks.gpu.{MODULES[section]}")
    with (folder / RESULTS_FILE).open("a", buffering=1) as output:
        for result in module.check(request):
            output.write(json.dumps(result.to_json()) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
