"""Evaluate finished episodes: outcome by page, answer, judge or function.

The outcome of an episode, by the evaluators of judge.evaluators.

    async with open_evaluator(config.judge, meter) as evaluator:
        verdict = await evaluator.evaluate(trajectory)

Combinations fail closed: an outcome that no evaluator decided masks the episode or is a failure, never a success.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import math
import re
import threading
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from decimal import Decimal
from itertools import islice
from typing import Any

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.budget import USAGE_FILE, BudgetSpent, LocalMeter, UsageMeter, check_prices
from megatron_webrl.judge.client import JudgeClient, ReplyCache
from megatron_webrl.judge.protocols import PROTOCOLS, Finding
from megatron_webrl.judge.questions import Asker, EpisodeView, PromptFiles, Undecided
from megatron_webrl.judge.verdict_file import VerdictFile
from megatron_webrl.types import JUDGE_ERROR, TRAINABLE_OUTCOMES, Trajectory, Verdict
from megatron_webrl.util.text import encodable, first_line, redact, shorten

DONE, ANSWER = "done", "answer"  # ends by the page, by the agent
STEPS_EXHAUSTED, GO_BACKS = "steps_exhausted", "go_backs"  # by the last step, by going back from the start page
REGULAR_ENDS = (DONE, ANSWER, STEPS_EXHAUSTED, GO_BACKS)

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
    reward = float(verdict.outcome == "success")
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


NO_REFERENCE = "no_reference"  # masks an episode of a task without the reference answer that its evaluator needs
NO_DECISION = "no_decision"  # masks an episode that the user's function did not decide
MAX_THREADS = 32  # for plain functions of the user


@dataclass(frozen=True)
class Opinion:
    """What one evaluator says. With `first` the next one is asked unless it `decides`."""

    verdict: Verdict
    decides: bool


Evaluate = Callable[[Trajectory], Awaitable[Opinion]]


class EpisodeEvaluator:
    """Combines evaluators into one verdict."""

    def __init__(self, parts: Sequence[tuple[str, Evaluate]], combine: str) -> None:
        """`parts`: name and function of each; `combine`: "first", "all" or "any"."""
        self._parts, self._combine = parts, combine

    async def evaluate(self, trajectory: Trajectory) -> Verdict:
        """The verdict on an unjudged episode. An episode with another end than a regular one keeps its mask, unjudged.

        Raises BudgetSpent; a judge without a usable reply masks the episode instead.
        """
        started = time.monotonic()
        if trajectory.end_reason not in REGULAR_ENDS:
            masked = outcome(None, trajectory.end_reason)
            return Verdict(masked, evaluator="none", reason="the episode did not end regularly")
        opinions: list[Opinion] = []
        for _, evaluate in self._parts:
            opinions.append(await evaluate(trajectory))
            if self._is_decided(opinions[-1]):
                break
        verdict = _combined(self._combine, opinions, len(self._parts))
        if len(self._parts) > 1 and self._combine != "first":
            names = ", ".join(name for name, _ in self._parts)
            verdict = replace(verdict, evaluator=f"{self._combine}({names})")
        return replace(verdict, seconds=time.monotonic() - started)

    def _is_decided(self, opinion: Opinion) -> bool:
        if self._combine == "first":
            return opinion.decides
        return opinion.verdict.outcome == ("failure" if self._combine == "all" else "success")


def _combined(combine: str, opinions: Sequence[Opinion], parts: int) -> Verdict:
    """The verdict that decides, with the stages and the usage of all."""
    verdicts = [opinion.verdict for opinion in opinions]
    masks = [verdict for verdict in verdicts if verdict.outcome not in TRAINABLE_OUTCOMES]
    last = opinions[-1]
    if combine == "first":
        chosen = last.verdict if last.decides or not masks else masks[0]
    else:
        decisive = "failure" if combine == "all" else "success"
        chosen = last.verdict if last.verdict.outcome == decisive or not masks else masks[0]
    protocol = next((verdict for verdict in verdicts if verdict.protocol), chosen)
    return replace(
        chosen,
        protocol=protocol.protocol,
        prompts=protocol.prompts,
        stages=tuple(stage for verdict in verdicts for stage in verdict.stages),
        calls=sum(verdict.calls for verdict in verdicts),
        prompt_tokens=sum(verdict.prompt_tokens for verdict in verdicts),
        response_tokens=sum(verdict.response_tokens for verdict in verdicts),
        dollars=sum(verdict.dollars for verdict in verdicts),
    )


@asynccontextmanager
async def open_evaluator(settings: JudgeConfig, meter: UsageMeter) -> AsyncIterator[EpisodeEvaluator]:
    """The evaluator of a configuration; `meter` counts requests to judge models against the budget.

    Raises ConfigError for an unknown evaluator, and for missing prompts, models, endpoints or keys.
    """
    if not settings.evaluators:
        raise ConfigError("judge.evaluators is empty; name at least one, such as page")
    async with AsyncExitStack() as stack:
        parts: list[tuple[str, Evaluate]] = []
        threads = _Threads()
        for name in settings.evaluators:
            if name == "judge":
                parts.append((name, _by_judge((await stack.enter_async_context(Judge(settings, meter))).judge)))
            elif name == "page":
                parts.append((name, _by_page(settings.reward_threshold)))
            elif name in _BY_ANSWER:
                parts.append((name, _by_answer(name, _BY_ANSWER[name])))
            else:
                parts.append((name, _by_function(name, load_function(name), threads, settings.deadline_seconds)))
        yield EpisodeEvaluator(parts, settings.combine)


def load_function(path: str) -> Callable[[Trajectory], Any]:
    """The function of an import path, such as my_package.my_module:f. Raises ConfigError."""
    module, _, name = path.partition(":")
    known = ", ".join(["page", *_BY_ANSWER, "judge"])
    if not module or not name:
        raise ConfigError(f"judge.evaluators: {path!r} is none of {known}, nor of the form package.module:function")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's: importing it can raise anything
        raise ConfigError(f"judge.evaluators: {path}: {type(error).__name__}: {first_line(error)}") from error
    if not callable(function):
        raise ConfigError(f"judge.evaluators: {path} is {type(function).__name__}, not a function")
    return function


def _by_page(reward_threshold: float) -> Evaluate:
    """The page's reward, else the task's answer; decides if there is one of them."""

    async def evaluate(trajectory: Trajectory) -> Opinion:
        verdict = page_verdict(trajectory, reward_threshold)
        known = trajectory.page_reward is not None or trajectory.task.answer is not None
        return Opinion(verdict, known and verdict.outcome in TRAINABLE_OUTCOMES)

    return evaluate


def _by_answer(name: str, equal: Callable[[str, str], bool]) -> Evaluate:
    async def evaluate(trajectory: Trajectory) -> Opinion:
        reference, answer = trajectory.task.answer, trajectory.answer
        if reference is None or not reference.strip():
            return Opinion(Verdict(NO_REFERENCE, evaluator=name, reason="the task has no reference answer"), False)
        if answer is None:
            return Opinion(Verdict("failure", evaluator=name, reason="the agent gave no answer"), True)
        right = equal(answer, reference)
        reason = f"the answer {'equals' if right else 'differs from'} the reference"
        return Opinion(Verdict("success" if right else "failure", evaluator=name, reason=reason), True)

    return evaluate


def _by_judge(judge: Callable[[Trajectory], Awaitable[Verdict]]) -> Evaluate:
    async def evaluate(trajectory: Trajectory) -> Opinion:
        verdict = _encodable(await judge(trajectory))
        return Opinion(verdict, verdict.outcome != JUDGE_ERROR)

    return evaluate


class _Threads:
    """Runs functions in daemon threads, so that one that hangs delays neither name resolution, which has the event
    loop's own threads, nor the end of the process."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_THREADS)

    async def run(self, function: Callable[[Trajectory], Any], trajectory: Trajectory) -> Any:
        """What the function returns or raises. Waits for one of MAX_THREADS; a caller that gives up does not end it."""
        loop = asyncio.get_running_loop()
        await self._free.acquire()
        found: asyncio.Future[Any] = loop.create_future()

        def finish(result: Any, error: BaseException | None) -> None:
            self._free.release()
            if found.cancelled():
                return
            if error is None:
                found.set_result(result)
            else:
                found.set_exception(error)

        def work() -> None:
            result, error = None, None
            try:
                result = function(trajectory)
            except BaseException as raised:
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(finish, result, error)

        threading.Thread(target=work, name="evaluator", daemon=True).start()
        return await found


def _by_function(path: str, function: Callable[[Trajectory], Any], threads: _Threads, seconds: float) -> Evaluate:
    """A function of the user: it returns a bool, None (undecided), a reason that masks the episode, or a Verdict.

    It may be a coroutine; a plain function runs in a thread. One that raises, returns anything else or takes more than
    `seconds` masks the episode as judge_error.
    """

    async def evaluate(trajectory: Trajectory) -> Opinion:
        try:
            async with asyncio.timeout(seconds) as limit:
                found = await threads.run(function, trajectory)
                if inspect.isawaitable(found):
                    found = await found
            return _opinion(path, found)
        except Exception as error:  # the user's function can raise anything; the episode must not be lost
            log.exception("evaluator %s failed on ticket %d, index %d", path, trajectory.ticket, trajectory.index)
            late = f"no verdict within {seconds:g} s (judge.deadline_seconds)" if limit.expired() else ""
            reason = shorten(late or f"{type(error).__name__}: {first_line(error)}", MAX_REASON_CHARS)
            return Opinion(Verdict(JUDGE_ERROR, evaluator=path, reason=reason), False)

    return evaluate


def _encodable(verdict: Verdict) -> Verdict:
    """The verdict with texts that pages and files can hold; models and functions of the user can write any."""
    stages = tuple(replace(stage, text=encodable(stage.text)) for stage in verdict.stages)
    return replace(verdict, reason=encodable(verdict.reason), stages=stages)


def _opinion(path: str, found: Any) -> Opinion:
    if isinstance(found, Verdict):
        return Opinion(_encodable(replace(found, evaluator=path)), found.outcome not in (NO_DECISION, JUDGE_ERROR))
    if found is None:
        return Opinion(Verdict(NO_DECISION, evaluator=path), False)
    if isinstance(found, bool):
        return Opinion(Verdict("success" if found else "failure", evaluator=path), True)
    if isinstance(found, str) and found.isidentifier():
        return Opinion(Verdict(found, evaluator=path), True)
    raise TypeError(f"an evaluator returns bool, None, a reason such as 'blocked', or Verdict, not {found!r:.60}")


_BY_ANSWER: dict[str, Callable[[str, str], bool]] = {
    "exact_answer": lambda answer, reference: answer.strip() == reference.strip(),
    "normalized_answer": answers_match,
}


EPISODES_AT_ONCE = 32  # in memory, with their screenshots


@dataclass
class JudgedEpisodes:
    """Which episodes were judged, in the order of the files; the verdicts are in the file."""

    keys: list[str] = field(default_factory=list)
    masked: Counter[str] = field(default_factory=Counter)  # episodes without a regular end, by it: not judged
    stopped: str = ""  # why judging ended early


async def judge_episodes(
    episodes: Iterator[tuple[str, Trajectory]], limit: int | None, settings: JudgeConfig, verdicts: VerdictFile,
    progress: Callable[[int], None],
) -> JudgedEpisodes:  # fmt: skip
    """Judge the episodes with a regular end, at most the first `limit`, that have no verdict yet.

    `progress` gets the number of episodes done so far. Raises ConfigError.
    """
    found = JudgedEpisodes()
    chosen = islice(_regular(episodes, found), limit)
    workers = min(EPISODES_AT_ONCE, settings.concurrency)
    done = 0

    async def work(evaluator: EpisodeEvaluator) -> None:
        nonlocal done
        for key, trajectory in chosen:  # shared by all workers; each takes the next one
            if not verdicts.holds(key, trajectory):
                verdict = await evaluator.evaluate(trajectory)
                verdicts.add(key, trajectory, verdict)
            done += 1
            progress(done)

    meter = LocalMeter(settings.budget, file=verdicts.path.with_name(USAGE_FILE))
    async with open_evaluator(settings, meter) as evaluator:
        tasks = [asyncio.create_task(work(evaluator)) for _ in range(workers)]
        try:
            await asyncio.gather(*tasks)
        except BudgetSpent as error:
            found.stopped = str(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    found.keys = [key for key in found.keys if key in verdicts.lines]
    return found


def _regular(episodes: Iterator[tuple[str, Trajectory]], found: JudgedEpisodes) -> Iterator[tuple[str, Trajectory]]:
    for key, trajectory in episodes:
        if trajectory.end_reason in REGULAR_ENDS:
            found.keys.append(key)
            yield key, trajectory
        else:
            found.masked[trajectory.end_reason] += 1
