"""The outcome of an episode, by the evaluators of judge.evaluators.

    async with open_evaluator(config.judge, meter) as evaluator:
        verdict = await evaluator.evaluate(trajectory)

Combinations fail closed: an outcome that no evaluator decided masks the episode or is a failure, never a success.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from megatron_webrl.config.judge import JudgeConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.budget import UsageMeter
from megatron_webrl.judge.outcome import REGULAR_ENDS, answers_match, outcome, page_verdict
from megatron_webrl.types import JUDGE_ERROR, TRAINABLE_OUTCOMES, Trajectory, Verdict
from megatron_webrl.util.text import encodable, first_line, shorten

log = logging.getLogger(__name__)

NO_REFERENCE = "no_reference"  # masks an episode of a task without the reference answer that its evaluator needs
NO_DECISION = "no_decision"  # masks an episode that the user's function did not decide
MAX_REASON_CHARS = 300
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
                from megatron_webrl.judge.judge import Judge  # imports openai, which takes a second

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
