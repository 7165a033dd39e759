"""The prompt files of a protocol: <folder>/<protocol>/<stage>.md, and what all protocols share in <folder>/common/.

A system message is the stage's text, common/data.md (what fences are), and common/<form>.<mode>.md (the reply's form).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.replies import FORMS, MODES, ReplyForm

COMMON = ("data", *(f"{form}.{mode}" for form in FORMS for mode in MODES))
DIGEST_DIGITS = 16
_SOURCE_TREE = Path(__file__).parents[2]


@dataclass(frozen=True)
class PromptFiles:
    """The texts of one protocol."""

    protocol: str
    stages: dict[str, str]
    common: dict[str, str]
    digest: str  # of names and texts of all files

    @classmethod
    def load(cls, folder: str | Path, protocol: str, stages: Sequence[str]) -> PromptFiles:
        """Read the files of `stages`. A relative folder is also looked for in the source tree. Raises ConfigError."""
        root = _find(Path(folder))
        named = {stage: _read(root / protocol / f"{stage}.md") for stage in sorted(stages)}
        common = {name: _read(root / "common" / f"{name}.md") for name in sorted(COMMON)}
        digest = hashlib.sha256()
        for name, text in [*named.items(), *common.items()]:
            digest.update(f"{name}\0{text}\0".encode())
        return cls(protocol, named, common, digest.hexdigest()[:DIGEST_DIGITS])

    def system_message(self, stage: str, form: ReplyForm, mode: str) -> str:
        """The system message of a question; `mode` is one of replies.MODES."""
        return "\n\n".join((self.stages[stage], self.common["data"], self.common[f"{form.name}.{mode}"]))


def _find(folder: Path) -> Path:
    for root in (folder, _SOURCE_TREE / folder):
        if root.is_dir():
            return root
    raise ConfigError(f"judge.prompts={folder} is not a folder; name one with the files of configs/judge")


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigError(f"judge.prompts: {path}: {reason}; every stage of a protocol needs its file") from error
    if not text:
        raise ConfigError(f"judge.prompts: {path} is empty; every stage of a protocol needs its text")
    return text
