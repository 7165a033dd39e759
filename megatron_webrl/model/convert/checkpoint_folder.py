"""Find the checkpoint in a folder without importing torch."""

from __future__ import annotations

from pathlib import Path

MEGATRON_FOLDER, HF_FOLDER = "megatron", "hf"


class LoadError(ValueError):
    """Stored tensors do not match the model. The message names the tensor and its file."""


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path: the path itself, or the one named by its file `latest`. Raises LoadError."""
    pointer = path / "latest"
    found = path / pointer.read_text().strip() if pointer.is_file() else path
    for needed in (Path(MEGATRON_FOLDER, ".metadata"), Path(HF_FOLDER, "config.json")):
        if not (found / needed).is_file():
            raise LoadError(f"{found} is no checkpoint: it holds no {needed}")
    return found
