"""Evaluate finished episodes: outcome by page, answer, judge or function.

The outcome of an episode, by the evaluators of judge.evaluators.

    async with open_evaluator(config.judge, meter) as evaluator:
        verdict = await evaluator.evaluate(trajectory)

Combinations fail closed: an outcome that no evaluator decided masks the episode or is a failure, never a success.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import re
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, replace
from decimal import Decimal
from typing import Any

from megatron_webrl.config.import_path import find_function
from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.setting import ConfigError, is_import_path
from megatron_webrl.judge.budget import BudgetSpent, UsageMeter
from megatron_webrl.judge.client import JudgeClient, check_prices, voter_slots
from megatron_webrl.judge.protocols import Finding, find_protocol
from megatron_webrl.judge.questions import Asker, EpisodeView, PromptFiles, Undecided
from megatron_webrl.types import ANSWER, DONE, JUDGE_ERROR, REGULAR_ENDS, TRAINABLE_OUTCOMES, Trajectory, Verdict, Vote
from megatron_webrl.util.concurrency import in_own_thread, run_together
from megatron_webrl.util.text import encodable, first_line, redact, shorten

_NUMBER = re.compile(r"([$€£]?) ?(-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,30})(?:\.[0-9]{1,30})?)")


def outcome(
    reward: float | None,
    end_reason: str,
    reference: str | None = None,
    answer: str | None = None,
    reward_threshold: float = 0.0,
) -> str:
    """Return "success" or "failure" for a regular end of the episode, otherwise the reason that masks it.

    `reward` is the page's, None if it gave none; a success has at least `reward_threshold`, and more than 0.
    `end_reason` is one of REGULAR_ENDS, or the name of a fault (browser_error, engine_error, episode_timeout,
    context_overflow, ...), which is returned. Fails closed: a page that ends an episode without a reward, or with a
    reward that is not finite, masks it. A task with a `reference` succeeds only by a matching `answer` on a page that
    gave no reward: there a reward of the page itself marks a wrong action. Raises ValueError if `end_reason` is empty
    or itself a verdict.
    """
    if not end_reason or end_reason in TRAINABLE_OUTCOMES:
        raise ValueError(f"end_reason={end_reason!r} does not say how the episode ended")
    if end_reason not in REGULAR_ENDS:
        return end_reason
    if reward is None and end_reason == ANSWER and reference is not None:
        return "success" if answer is not None and answers_match(answer, reference) else "failure"
    if reward is None:
        return "no_reward" if end_reason == DONE else "failure"
    if not math.isfinite(reward):
        return "bad_reward"
    return "success" if reward > 0 and reward >= reward_threshold and reference is None else "failure"


def page_verdict(trajectory: Trajectory, reward_threshold: float = 0.0) -> Verdict:
    """The verdict of an episode by the page's reward, else by the task's answer."""
    task = trajectory.task
    decided = outcome(trajectory.page_reward, trajectory.end_reason, task.answer, trajectory.answer, reward_threshold)
    reward = "none" if trajectory.page_reward is None else f"{trajectory.page_reward:g}"
    return Verdict(decided, "page", reason=f"end: {trajectory.end_reason}; reward of the page: {reward}")


def with_verdict(trajectory: Trajectory, verdict: Verdict) -> Trajectory:
    """The trajectory with the outcome and the reward of a verdict."""
    reward = {"success": 1.0, "failure": verdict.credit}.get(verdict.outcome, 0.0)
    return replace(trajectory, outcome=verdict.outcome, reward=reward, verdict=verdict)


def answers_match(answer: str, reference: str) -> bool:
    """Whether two texts are equal as numbers, or as text up to case, spaces, quotes and a final full stop.

    A number with a currency sign equals one without, but not one with another sign.
    """
    actual, expected = _plain(answer), _plain(reference)
    if actual == expected:
        return bool(expected)
    numbers = [_NUMBER.fullmatch(text) for text in (actual, expected)]
    values = [Decimal(number[2].replace(",", "")) for number in numbers if number]
    signs = {number[1] for number in numbers if number} - {""}
    return len(values) == 2 and values[0] == values[1] and len(signs) < 2


def _plain(text: str) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return text.removesuffix(".").strip("\"'` \u2018\u2019\u201c\u201d")


log = logging.getLogger(__name__)

MAX_REASON_CHARS = 300


class Judge:
    """Judges episodes, many at once, while its `client` is open."""

    def __init__(self, settings: JudgeConfig, meter: UsageMeter) -> None:
        """Raises ConfigError for missing prompts, models, endpoints or keys."""
        self._settings, self._protocol = settings, find_protocol(settings)
        stages = self._protocol.stages
        self._prompts = PromptFiles.load(settings.prompts, self._protocol.folder, stages)
        self.client = JudgeClient(settings, meter)
        # Each voter gives a first verdict before any gives a second one.
        self._voters = voter_slots(settings) * settings.votes
        used = (*self._voters, *stages)  # other slots have the name of their stage
        check_prices(settings.budget, {slot: each for slot, each in self.client.models.items() if slot in used})

    async def judge(self, trajectory: Trajectory) -> tuple[Verdict, bool]:
        """The verdict on an episode with a regular end, and whether it decides: not as judge_error, without an answer.

        Raises BudgetSpent, JobEnded, JobFailed.
        """
        verdicts = await run_together(self._judge_once(trajectory, voter) for voter in self._voters)
        verdict = verdicts[0]
        if len(verdicts) > 1:
            models = (self.client.models[voter].name for voter in self._voters)
            verdict = majority_verdict(list(zip(models, verdicts, strict=True)))
        return verdict, verdict.outcome != JUDGE_ERROR

    async def _judge_once(self, trajectory: Trajectory, voter: str) -> Verdict:
        """The verdict of one model. Any exception but those of `judge` masks the episode, too, and is logged."""
        from megatron_webrl.control.connection import JobEnded, JobFailed  # imports torch, which takes seconds

        deadline = asyncio.get_running_loop().time() + self._settings.deadline_seconds
        asker = Asker(self.client, self._prompts, self._settings, deadline, voter)
        try:
            finding = await self._protocol.judge(EpisodeView.of(trajectory), asker)
        except Undecided as error:
            finding = Finding(JUDGE_ERROR, str(error))
        except (BudgetSpent, JobEnded, JobFailed):
            raise
        except Exception as error:  # of an episode or a reply that nobody foresaw; the worker must not end
            trace = redact("".join(traceback.format_exception(error)))
            log.error("the judge failed on ticket %d, index %d:\n%s", trajectory.ticket, trajectory.index, trace)
            finding = Finding(JUDGE_ERROR, f"{type(error).__name__} in the judge")
        unusable = sum(len(stage.errors) == stage.attempts and stage.decision != "none" for stage in asker.stages)
        decided = f"; unusable replies that decided: {unusable}" if unusable else ""  # judge.unusable_replies
        reason = shorten(" ".join(finding.reason.split()), MAX_REASON_CHARS) + decided
        verdict = Verdict(
            finding.outcome, "judge", self._settings.protocol, self._prompts.digest, reason, tuple(asker.stages),
            credit=finding.credit, **asdict(asker.spending),
        )  # fmt: skip
        return _encodable(verdict)


def majority_verdict(verdicts: Sequence[tuple[str, Verdict]]) -> Verdict:
    """The outcome of more than half of several verdicts, each with its model, their mean credit, and all their cost.

    Without such a majority the episode is masked as judge_error. A vote without a usable reply, judge_error, is counted
    among all votes: it helps no outcome. The stages of a verdict name its number.
    """
    votes = tuple(Vote(model, verdict.outcome) for model, verdict in verdicts)
    counts = Counter(vote.outcome for vote in votes)
    outcome, most = counts.most_common(1)[0]
    alike = [verdict for _, verdict in verdicts if verdict.outcome == outcome]
    decides = replace(alike[0], credit=sum(verdict.credit for verdict in alike) / most)
    if 2 * most <= len(votes):
        decides = replace(decides, outcome=JUDGE_ERROR, reason="no majority", credit=0.0)
    totals = {name: sum(getattr(verdict, name) for _, verdict in verdicts) for name in _USAGE}
    counted = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    reason = shorten(f"votes: {counted}; {decides.reason}", MAX_REASON_CHARS)
    stages = tuple(
        replace(stage, subject=f"vote {number}, {stage.subject}".removesuffix(", "))
        for number, (_, verdict) in enumerate(verdicts, 1) for stage in verdict.stages
    )  # fmt: skip
    return replace(decides, reason=reason, stages=stages, votes=votes, **totals)


NO_REFERENCE = "no_reference"  # masks an episode of a task without the reference answer that its evaluator needs
NO_DECISION = "no_decision"  # masks an episode that the user's function did not decide
MAX_THREADS = 32  # for plain functions of the user

Evaluate = Callable[[Trajectory], Awaitable[tuple[Verdict, bool]]]
"""What one evaluator says, and whether it decides: with `first` the next one is asked otherwise."""


class EpisodeEvaluator:
    """Combines evaluators into one verdict."""

    def __init__(
        self, parts: Sequence[tuple[str, Evaluate]], combine: str, of_tasks: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`parts`: name and function of each; `combine`: "first", "all" or "any"; `of_tasks`: the names of those that
        decide the tasks of a source of tasks.mix, by its name; else all do.
        """
        self._parts, self._combine, self._of_tasks = parts, combine, of_tasks or {}

    async def evaluate(self, trajectory: Trajectory) -> Verdict:
        """The verdict on an unjudged episode. An episode with another end than a regular one keeps its mask, unjudged.

        Raises BudgetSpent; a judge without a usable reply masks the episode instead.
        """
        started = time.monotonic()
        if trajectory.end_reason not in REGULAR_ENDS:
            masked = outcome(None, trajectory.end_reason)
            return Verdict(masked, evaluator="none", reason="the episode did not end regularly")
        decisive = {"all": "failure", "any": "success"}.get(self._combine)
        verdicts: list[Verdict] = []
        is_decided = False
        names = self._of_tasks.get(trajectory.task.part)
        parts = [part for part in self._parts if not names or part[0] in names]
        for _, evaluate in parts:
            verdict, decides = await evaluate(trajectory)
            verdicts.append(verdict)
            is_decided = decides if decisive is None else verdict.outcome == decisive
            if is_decided:
                break
        masks = [verdict for verdict in verdicts if verdict.outcome not in TRAINABLE_OUTCOMES]
        chosen = verdicts[-1] if is_decided or not masks else masks[0]
        if len(parts) > 1 and decisive:
            chosen = replace(chosen, evaluator=f"{self._combine}({', '.join(name for name, _ in parts)})")
        judged = next((verdict for verdict in verdicts if verdict.protocol), chosen)
        totals = {name: sum(getattr(verdict, name) for verdict in verdicts) for name in _USAGE}
        return replace(
            chosen, protocol=judged.protocol, prompts=judged.prompts, votes=judged.votes, **totals,
            seconds=time.monotonic() - started, stages=tuple(stage for verdict in verdicts for stage in verdict.stages),
        )  # fmt: skip


_USAGE = ("calls", "prompt_tokens", "response_tokens", "dollars")


@asynccontextmanager
async def open_evaluator(
    settings: JudgeConfig, meter: UsageMeter, of_tasks: Mapping[str, Sequence[str]] | None = None
) -> AsyncIterator[EpisodeEvaluator]:
    """The evaluator of a configuration; `meter` counts requests to judge models against the budget; `of_tasks` as in
    EpisodeEvaluator.

    Raises ConfigError for an unknown evaluator, and for missing prompts, models, endpoints or keys.
    """
    if not settings.evaluators:
        raise ConfigError("judge.evaluators is empty; name at least one, such as page")
    async with AsyncExitStack() as stack:
        parts: list[tuple[str, Evaluate]] = []
        for name in settings.evaluators:
            if name == "judge":
                judge = Judge(settings, meter)
                await stack.enter_async_context(judge.client)
                parts.append((name, judge.judge))
            elif name == "page":
                parts.append((name, _by_page(settings.reward_threshold)))
            elif name in _BY_ANSWER:
                parts.append((name, _by_answer(name, _BY_ANSWER[name])))
            else:
                parts.append((name, _ByFunction(name, settings.deadline_seconds)))
        yield EpisodeEvaluator(parts, settings.combine, of_tasks)


def _by_page(reward_threshold: float) -> Evaluate:
    """The page's reward, else the task's answer; decides if there is one of them."""

    async def evaluate(trajectory: Trajectory) -> tuple[Verdict, bool]:
        verdict = page_verdict(trajectory, reward_threshold)
        known = trajectory.page_reward is not None or trajectory.task.answer is not None
        return verdict, known and verdict.outcome in TRAINABLE_OUTCOMES

    return evaluate


def _by_answer(name: str, equal: Callable[[str, str], bool]) -> Evaluate:
    async def evaluate(trajectory: Trajectory) -> tuple[Verdict, bool]:
        reference, answer = trajectory.task.answer, trajectory.answer
        if reference is None or not reference.strip():
            return Verdict(NO_REFERENCE, evaluator=name, reason="the task has no reference answer"), False
        if answer is None:
            return Verdict("failure", evaluator=name, reason="the agent gave no answer"), True
        right = equal(answer, reference)
        reason = f"the answer {'equals' if right else 'differs from'} the reference"
        return Verdict("success" if right else "failure", evaluator=name, reason=reason), True

    return evaluate


_BY_ANSWER: dict[str, Callable[[str, str], bool]] = {
    "exact_answer": lambda answer, reference: answer.strip() == reference.strip(),
    "normalized_answer": answers_match,
}


class _ByFunction:
    """A function of the user: it returns a bool, None (undecided), a reason that masks the episode, or a Verdict.

    It may be a coroutine; a plain function runs in a daemon thread, so that one that hangs delays neither name
    resolution, which has the event loop's own threads, nor the end of the process. One that raises, returns anything
    else or takes more than `seconds` masks the episode as judge_error.
    """

    def __init__(self, path: str, seconds: float) -> None:
        """`path`: import path, such as my_package.my_module:f. Raises ConfigError."""
        self._path, self._seconds, self._free = path, seconds, asyncio.Semaphore(MAX_THREADS)
        known = ", ".join(["page", *_BY_ANSWER, "judge"])
        if not is_import_path(path):
            raise ConfigError(f"judge.evaluators: {path!r} is none of {known}, nor of the form package.module:function")
        self._function = find_function(path, "judge.evaluators", ("trajectory",))

    async def __call__(self, trajectory: Trajectory) -> tuple[Verdict, bool]:
        try:
            async with asyncio.timeout(self._seconds) as limit:
                found = await self._in_thread(trajectory)
                if inspect.isawaitable(found):
                    found = await found
            return self._opinion(found)
        except Exception as error:  # the user's function can raise anything; the episode must not be lost
            log.exception("evaluator %s failed on ticket %d, index %d", self._path, trajectory.ticket, trajectory.index)
            late = f"no verdict within {self._seconds:g} s (judge.deadline_seconds)" if limit.expired() else ""
            reason = shorten(late or f"{type(error).__name__}: {first_line(error)}", MAX_REASON_CHARS)
            return Verdict(JUDGE_ERROR, evaluator=self._path, reason=reason), False

    async def _in_thread(self, trajectory: Trajectory) -> Any:
        """What the function returns or raises. Waits for one of MAX_THREADS, which a function that hangs keeps."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()

        def work() -> Any:
            try:
                return self._function(trajectory)
            finally:
                with suppress(RuntimeError):  # the loop is closed: nobody waits
                    loop.call_soon_threadsafe(self._free.release)

        return await in_own_thread("evaluator", work)

    def _opinion(self, found: Any) -> tuple[Verdict, bool]:
        if isinstance(found, Verdict) and 0 <= found.credit < 1:
            return _encodable(replace(found, evaluator=self._path)), found.outcome not in (NO_DECISION, JUDGE_ERROR)
        if found is None:
            return Verdict(NO_DECISION, evaluator=self._path), False
        if isinstance(found, bool):
            return Verdict("success" if found else "failure", evaluator=self._path), True
        if isinstance(found, str) and found.isidentifier():
            return Verdict(found, evaluator=self._path), True
        raise TypeError(f"an evaluator returns bool, None, a reason such as 'blocked', or Verdict, not {found!r:.60}")


def _encodable(verdict: Verdict) -> Verdict:
    """The verdict with texts that pages and files can hold; models and functions of the user can write any."""
    stages = tuple(replace(stage, text=encodable(stage.text)) for stage in verdict.stages)
    return replace(verdict, reason=encodable(verdict.reason), stages=stages)
