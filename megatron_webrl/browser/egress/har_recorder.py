"""Record what an episode fetches."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import tempfile
import time
import zipfile
from pathlib import Path

from playwright.async_api import BrowserContext

from megatron_webrl.browser.egress.har_archive import (
    FORMAT,
    HAR_MEMBER,
    READ_REQUEST_HEADERS,
    VISIT_MEMBER,
    Visit,
    visit_path,
)
from megatron_webrl.types import Task
from megatron_webrl.util import child_process

log = logging.getLogger(__name__)


class HARRecorder:
    """Records the responses of one browser context: start -> save. `clock_ms` is the time of the visit."""

    def __init__(self, context: BrowserContext, folder: Path, task: Task) -> None:
        self.clock_ms = int(time.time() * 1000)
        self.void = False  # the episode did not begin: nothing is to be kept
        self._context, self._folder, self._task = context, folder, task
        self._draft = child_process.make_scratch_folder()  # readable by its owner only

    async def start(self) -> None:
        """Start recording. Raises PlaywrightError."""
        await self._context.tracing.start_har(self._draft / HAR_MEMBER, content="attach", mode="minimal")

    async def save(self) -> Path | None:
        """Stop, and write the file unless `void`; readers never see it incomplete.

        Raises PlaywrightError, OSError, NotRecorded; the temporary files are removed in any case.
        """
        try:
            await self._context.tracing.stop_har()
            return None if self.void else await asyncio.to_thread(self._publish)
        finally:
            shutil.rmtree(self._draft, ignore_errors=True)

    def _publish(self) -> Path:
        with tempfile.NamedTemporaryFile(prefix=".visit-", dir=self._folder) as archive:  # readable by its owner only
            with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
                visit = {"format": FORMAT, "task": self._task.id, "clock_ms": self.clock_ms}
                file.writestr(VISIT_MEMBER, json.dumps(visit))
                file.writestr(HAR_MEMBER, self._har())
                for member in sorted(self._draft.iterdir()):
                    if member.name != HAR_MEMBER:
                        file.write(member, member.name)
            archive.flush()
            Visit(Path(archive.name), 0).close()  # a file that cannot be replayed is not published
            number = 0
            while True:
                path = visit_path(self._folder, self._task, number)
                try:
                    os.link(archive.name, path)  # fails if another visit has this name
                    return path
                except FileExistsError:
                    number += 1

    def _har(self) -> str:
        """The HAR without request headers that replay does not read, such as Cookie and Authorization."""
        har = json.loads((self._draft / HAR_MEMBER).read_text())
        for entry in har["log"]["entries"]:
            request = entry["request"]
            request["headers"] = [each for each in request["headers"] if each["name"].lower() in READ_REQUEST_HEADERS]
        return json.dumps(har)
