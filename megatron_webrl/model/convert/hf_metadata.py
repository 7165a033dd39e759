"""Files of a Hugging Face folder other than weights: config, tokenizer, processor, generation config."""

from __future__ import annotations

import shutil
from pathlib import Path

WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.gguf")


def metadata_files(folder: Path) -> list[Path]:
    """Non-weight files of the folder, sorted by name."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not any(path.match(pattern) for pattern in WEIGHT_PATTERNS)
    )


def copy_metadata(source: Path, target: Path) -> None:
    """Copy all files except weights to a folder, creating it if needed."""
    target.mkdir(parents=True, exist_ok=True)
    for path in metadata_files(source):
        shutil.copyfile(path, target / path.name)
