"""Oracle of the offline websites: decides the judge's questions by what is true, not by what texts claim.

    WEBRL_SITE_TRUTH=FOLDER python -m tools.judge_endpoint --oracle tools.offline.site_truth:load ...

FOLDER is written by tools.make_webgym_tasks. The oracle finds the task by its instruction and reads from the bar codes
of the screenshots which pages were seen and what was done; texts of pages, actions and titles count for nothing. A
right answer is one of the task's forms, compared as `judge.outcome.answers_match` does.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from megatron_webrl.judge.evaluation import answers_match
from megatron_webrl.tasks.sites.websites import CELL_PIXELS, COLUMNS, FORMAT, ROWS, BarCode, page_digest
from tools.offline.task_rows import TaskTruth, read_truth

VARIABLE = "WEBRL_SITE_TRUTH"
_MARGIN = 2  # pixels of a cell's edge that are not sampled
_DARK, _BRIGHT = 80, 175  # grey levels
MAX_CODES = 20_000  # bar codes remembered: an episode's screenshots come with several questions


def read_bar_code(image: bytes) -> BarCode | None:
    """The bar code of an encoded screenshot in its original size; None without a legible one.

    It is legible in JPEG screenshots of quality 80 and in any viewport of at least 160 x 224 pixels.
    """
    try:
        with Image.open(io.BytesIO(image)) as opened:
            width, height = opened.size
            box = (width - COLUMNS * CELL_PIXELS, height - ROWS * CELL_PIXELS, width, height)
            if min(box) < 0:
                return None
            pixels = np.asarray(opened.convert("L").crop(box), np.float32)
    except OSError:
        return None
    cells = pixels.reshape(ROWS, CELL_PIXELS, COLUMNS, CELL_PIXELS)[:, _MARGIN:-_MARGIN, :, _MARGIN:-_MARGIN]
    levels = cells.mean((1, 3)).ravel()
    if ((levels > _DARK) & (levels < _BRIGHT)).any():
        return None
    content = np.packbits(levels >= _BRIGHT).tobytes()
    value = int.from_bytes(content[:7], "big")
    code = BarCode(page=(value >> 20) & 0xFFFFFFFF, effects=(value >> 4) & 0xFFFF, denied=bool(value & 1))
    return code if value >> 52 == FORMAT and code.to_bytes() == content else None


class SiteTruth:
    """Decides questions about tasks whose truth is given. Unknown tasks and facts get a no."""

    def __init__(self, truths: Iterable[TaskTruth]) -> None:
        self._tasks = {_plain(truth.instruction): truth for truth in truths}
        self._codes: dict[bytes, BarCode | None] = {}

    def decide(self, stage: str, fields: dict[str, str], images: list[bytes]) -> bool:
        """The answer to the question of a stage, of any protocol; see `tools.judge_endpoint`."""
        codes = [code for image in images if (code := self._code(image)) is not None]
        if stage == "blocked":
            return any(code.denied for code in codes)
        task = self._tasks.get(_plain(fields.get("TASK", "")))
        if task is None:
            return False
        if stage == "relevance":
            return len(codes) < len(images) or any(_is_relevant(task, code) for code in codes)
        if stage == "key_points":
            return True
        answer = fields.get("ANSWER", "")
        right = any(answers_match(answer, form) for form in task.answers)
        if "ANSWER" not in fields and stage in ("rubric", "reference"):  # a judge that reads screenshots alone
            known = any(_plain(fact.text) == _plain(fields.get("FACT", "")) for fact in task.facts)
            return is_fact_shown(task, fields["FACT"], codes) if known else is_task_shown(task, codes)  # of a group
        if stage == "reference":
            return right or answers_match(answer, fields.get("REFERENCE", ""))
        if stage == "rubric":
            return right and is_fact_shown(task, fields.get("FACT", ""), codes)
        return right and is_task_shown(task, codes)

    def _code(self, image: bytes) -> BarCode | None:
        digest = hashlib.blake2b(image, digest_size=16).digest()
        if digest not in self._codes:
            if len(self._codes) >= MAX_CODES:
                self._codes.clear()
            self._codes[digest] = read_bar_code(image)
        return self._codes[digest]


def load() -> SiteTruth:
    """The oracle of the folder that the environment variable WEBRL_SITE_TRUTH names. Raises ValueError."""
    path = os.environ.get(VARIABLE, "")
    try:
        return SiteTruth(read_truth(Path(path)))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={path} is no folder of tools.make_webgym_tasks: {error}") from error


def is_task_shown(task: TaskTruth, codes: Sequence[BarCode]) -> bool:
    """Whether screenshots show all that the task needs: all facts, and exactly the wanted effects."""
    return _has_effects(task, codes) and all(_is_seen(fact.pages, codes) for fact in task.facts)


def is_fact_shown(task: TaskTruth, text: str, codes: Sequence[BarCode]) -> bool:
    """Whether screenshots show a fact of the rubric. One that follows from the others is shown with all of them."""
    fact = next((fact for fact in task.facts if _plain(fact.text) == _plain(text)), None)
    if fact is None or not _has_effects(task, codes):
        return False
    return _is_seen(fact.pages, codes) if fact.pages else is_task_shown(task, codes)


def _has_effects(task: TaskTruth, codes: Sequence[BarCode]) -> bool:
    """Whether exactly the wanted effects have happened. Effects are never undone: the latest digest counts."""
    digests = [code.effects for code in codes if code.effects]
    return (digests[-1] if digests else 0) == task.effects


def _is_seen(pages: Sequence[str], codes: Sequence[BarCode]) -> bool:
    digests = {page_digest(page) for page in pages}
    return not pages or any(code.page in digests and not code.denied for code in codes)


def _is_relevant(task: TaskTruth, code: BarCode) -> bool:
    return code.denied or code.effects != 0 or any(_is_seen(fact.pages, [code]) for fact in task.facts if fact.pages)


def _plain(text: str) -> str:
    return " ".join(text.split())
