"""Usable replies by the digest of their request: a folder of small JSON files, shared by processes and runs."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.util import atomic_file

log = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass(frozen=True)
class CachedReply:
    """The reply to a request, as the endpoint sent it."""

    content: str
    prompt_tokens: int
    response_tokens: int
    format: int = FORMAT_VERSION


class ReplyCache:
    """Files <folder>/<first two digits>/<digest>.json. A file appears when it is complete; a damaged one is ignored."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder) if folder else None
        self._warned = False

    def get(self, digest: str) -> CachedReply | None:
        if self.folder is None:
            return None
        try:
            found = CachedReply(**json.loads(self._path(self.folder, digest).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return found if found.format == FORMAT_VERSION and isinstance(found.content, str) else None

    def put(self, digest: str, reply: CachedReply) -> None:
        """Keep a reply; a folder that cannot be written costs the reply, not the verdict."""
        if self.folder is None:
            return
        path = self._path(self.folder, digest)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write_json(path, asdict(reply))
        except OSError as error:
            if not self._warned:
                log.warning("judge.cache=%s cannot be written: %s; replies are not kept", self.folder, error.strerror)
            self._warned = True

    @staticmethod
    def _path(folder: Path, digest: str) -> Path:
        return folder / digest[:2] / f"{digest}.json"
