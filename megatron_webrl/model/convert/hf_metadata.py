"""What a Hugging Face folder holds besides weights: configuration, tokenizer, processor, generation settings."""

from __future__ import annotations

import shutil
from pathlib import Path

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


def metadata_files(folder: Path) -> list[Path]:
    """The folder's own files that are no weights, by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not any(path.match(pattern) for pattern in WEIGHT_PATTERNS)
    )


def copy_metadata(source: Path, target: Path) -> None:
    """Copy everything but weights from one folder to another, which is made if it is missing."""
    target.mkdir(parents=True, exist_ok=True)
    for path in metadata_files(source):
        shutil.copyfile(path, target / path.name)
