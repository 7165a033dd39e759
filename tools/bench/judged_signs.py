"""remember-sign-* whose last page is answered instead of pressed, for a judge to decide; and an oracle that can.

The pages give no reward: an agent's `answer` names the sign of the first page, and only the judge says whether it is
right. The oracle reads the sign from the judge's screenshots:

    python -m tools.judge_endpoint --port 8017 --oracle tools.bench.judged_signs:SignTruth
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace

from PIL import Image
from playwright.async_api import Page

from megatron_webrl.config.tasks import PageTasksConfig
from megatron_webrl.tasks.miniwob import MiniWobTaskSource
from megatron_webrl.types import Action, RubricFact, Task
from tools.bench.notes import FIRST_ROW, sign_near, signs_of

SOURCE = "tools.bench.judged_signs:JudgedSigns"
INSTRUCTION = "Note the sign. Later answer with it."
FACTS = (RubricFact("1", "The sign", "The answer is the colour and the shape of the one sign of the first page."),)
ASK_SCRIPT = "(text) => { document.getElementById('query').textContent = text; }"
AT_BUTTONS_SCRIPT = "() => Boolean(document.querySelector('#area button[data-sign]'))"
MAX_SIGNS = 20_000  # screenshots remembered: those of an episode come with several questions


class JudgedSigns(MiniWobTaskSource):
    """The configured environments. A context manager; close stops the server."""

    def __init__(self, tasks: PageTasksConfig) -> None:
        """Raises ConfigError as its base."""
        super().__init__(tasks.environments, tasks)

    def make_task(self, environment: str, seed: int) -> Task:
        return replace(super().make_task(environment, seed), source=SOURCE, facts=FACTS)

    async def open(self, page: Page, task: Task) -> str:
        """Start the episode; returns the instruction."""
        await super().open(page, task)
        await page.evaluate(ASK_SCRIPT, INSTRUCTION)
        return INSTRUCTION

    async def result(self, page: Page, task: Task) -> tuple[None, bool]:
        """No reward; a button that is pressed ends the episode, without an answer."""
        _, done = await super().result(page, task)
        return None, done

    async def demonstrate(self, page: Page, task: Task, premature_submit: bool = False) -> Action:
        """The next scripted action; on the last page the note as an answer. Raises ScriptedPolicyError."""
        action = await super().demonstrate(page, task, premature_submit)
        if await page.evaluate(AT_BUTTONS_SCRIPT):
            return Action("answer", text=action.note, note=action.note)
        return action


class SignTruth:
    """Decides the judge's questions by the only sign of a screenshot; without such a screenshot nothing is shown.

    The question about the fact comes without the answer, which another one compares.
    """

    def __init__(self) -> None:
        self._signs: dict[bytes, str | None] = {}

    def decide(self, stage: str, fields: dict[str, str], images: list[bytes]) -> bool:
        """See `tools.judge_endpoint.oracle.Oracle`."""
        if stage in ("blocked", "relevance"):
            return stage == "relevance"
        shown, answer = {sign for image in images if (sign := self._only_sign(image))}, fields.get("ANSWER")
        return bool(shown) and (answer is None or answer in shown)

    def _only_sign(self, image: bytes) -> str | None:
        digest = hashlib.blake2b(image, digest_size=16).digest()
        if digest not in self._signs:
            if len(self._signs) >= MAX_SIGNS:
                self._signs.clear()
            alone = len(signs_of(Image.open(io.BytesIO(image)).convert("RGB"))) == 1
            self._signs[digest] = sign_near(image, 0, FIRST_ROW, float("inf")) if alone else None
        return self._signs[digest]
