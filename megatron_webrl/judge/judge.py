"""The judge: a verdict on an episode by questions to judge models."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.judge.budget import BudgetSpent, UsageMeter, check_prices
from megatron_webrl.judge.cache import ReplyCache
from megatron_webrl.judge.client import JudgeClient
from megatron_webrl.judge.episode_view import EpisodeView
from megatron_webrl.judge.prompts import PromptFiles
from megatron_webrl.judge.protocols.base import Finding
from megatron_webrl.judge.protocols.catalog import PROTOCOLS
from megatron_webrl.judge.questions import Asker, Undecided
from megatron_webrl.types import JUDGE_ERROR, Trajectory, Verdict
from megatron_webrl.util.text import redact, shorten

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 300


class Judge:
    """Judges episodes, many at once. An async context manager."""

    def __init__(self, settings: JudgeConfig, meter: UsageMeter) -> None:
        """Raises ConfigError for missing prompts, models, endpoints or keys."""
        (kind,) = [kind for kind in PROTOCOLS if kind.name == settings.protocol]
        self._settings, self._protocol = settings, kind(settings)
        self._prompts = PromptFiles.load(settings.prompts, kind.name, kind.stages)
        self._cache = ReplyCache(settings.cache)
        self._client = JudgeClient(settings, meter)
        used = ("verdict", *kind.stages)  # other slots have the name of their stage
        check_prices(settings.budget, {slot: each for slot, each in self._client.models.items() if slot in used})

    async def __aenter__(self) -> Judge:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._client.__aexit__(*exception)

    async def judge(self, trajectory: Trajectory) -> Verdict:
        """The verdict on an episode with a regular end; masked as judge_error without usable answers.

        Raises BudgetSpent, JobEnded, JobFailed. Any other exception masks the episode, too, and is logged.
        """
        started = time.monotonic()
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_seconds
        asker = Asker(self._client, self._prompts, self._settings, self._cache, deadline)
        try:
            finding = await self._protocol.judge(EpisodeView.of(trajectory), asker)
        except Undecided as error:
            finding = Finding(JUDGE_ERROR, str(error))
        except BudgetSpent:
            raise
        except Exception as error:  # of an episode or a reply that nobody foresaw; the worker must not end
            finding = self._masked(trajectory, error)
        spending = asker.spending
        return Verdict(
            outcome=finding.outcome, evaluator="judge", protocol=self._protocol.name, prompts=self._prompts.digest,
            reason=shorten(" ".join(finding.reason.split()), MAX_REASON_CHARS), stages=asker.stages,
            calls=spending.calls, prompt_tokens=spending.prompt_tokens, response_tokens=spending.response_tokens,
            dollars=spending.dollars, seconds=time.monotonic() - started,
        )  # fmt: skip

    def _masked(self, trajectory: Trajectory, error: Exception) -> Finding:
        """The mask of an unexpected exception; raises one that says that the job is over."""
        from megatron_webrl.control.connection import JobEnded, JobFailed  # imports torch, which takes seconds

        if isinstance(error, JobEnded | JobFailed):
            raise error
        trace = redact("".join(traceback.format_exception(error)))
        log.error("the judge failed on ticket %d, index %d:\n%s", trajectory.ticket, trajectory.index, trace)
        return Finding(JUDGE_ERROR, f"{type(error).__name__} in the judge")
