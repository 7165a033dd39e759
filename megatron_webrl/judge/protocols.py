"""Judge protocols: rubric and its released variants, WebJudge, WebVoyager, AgentTrek.

The rubric judge, after WebGym: relevance of each screenshot, blocked, supported, each fact, reference answer.

    blocked?     yes: masks the episode                    (also without an answer)
    no answer:   failure
    relevant?    each screenshot but the last, concurrently; without a usable reply the screenshot is kept
    supported?   no: failure
    fact 1?, fact 2?, ...  in order; the first no: failure
    agrees with the reference, if there is one?  no: failure
    success

With judge.graded all facts and the reference are asked for, and the share of yes is the credit of a failure.

The blocked stage comes first because it needs no other and saves all others where it masks.

webgym and async_webrl follow the rules of the released codes of WebGym (arXiv 2601.02439) and AsyncWebRL (arXiv
2606.05597) where these differ from the above: docs/judge.md has the table.

WebJudge, the protocol of Online-Mind2Web (arXiv 2504.01382): key points, a score for each screenshot, outcome.

The key points of the task are listed first. Each screenshot gets a score from 1 to 5; those with at least 3 are shown
to the last question, with the notes that were made of them. An episode without an answer can be a success, since many
of its tasks ask for an effect only. Websites that block the agent are not told apart.

WebVoyager's protocol (arXiv 2401.13919): one question about task, answer and the last screenshots.

Their evaluation shows the last k screenshots, and counts an episode without an answer as a failure. k is
judge.max_screenshots here; published results use 15.

AgentTrek's protocol (arXiv 2412.09605), as the repository of Online-Mind2Web and OpenWebRL (arXiv 2606.02031) use it:
one lenient question about reasoning and actions of all steps and the last screenshot. OpenWebRL counts an episode
without an answer as a failure, unasked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from megatron_webrl.config.import_path import find, find_function, kind_of
from megatron_webrl.config.judge import JudgeConfig, OwnProtocolConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.questions import RELEVANT_SCORE, Answer, Asker, EpisodeView, Question, Screenshot
from megatron_webrl.judge.replies import KEY_POINTS, SCORE, VERDICT, ReplyForm, numbered_lines
from megatron_webrl.types import BLOCKED
from megatron_webrl.util.concurrency import run_together


@dataclass(frozen=True)
class Finding:
    """The outcome of a protocol."""

    outcome: str  # "success", "failure" or types.BLOCKED
    reason: str
    credit: float = 0.0  # of a failure, with judge.graded: share of the requirements that it fulfils


@dataclass(frozen=True)
class JudgeProtocol:
    """The questions of a verdict, in order, and what follows from the answers."""

    folder: str  # of its prompt files, within judge.prompts
    stages: Sequence[str]  # prompt files that it needs
    judge: Callable[[EpisodeView, Asker], Awaitable[Finding]]
    """Judges an episode with a regular end. Raises Undecided without a usable answer, and BudgetSpent."""


NO_ANSWER = Finding("failure", "the agent gave no answer")

RELEVANCE_TOKENS, BLOCKED_TOKENS, VERDICT_TOKENS = 600, 500, 800  # limits of replies, as published
BLOCKED_SCREENSHOTS = 20  # evenly sampled, as published


async def judge_by_rubric(episode: EpisodeView, asker: Asker, released: str = "") -> Finding:
    """Judge by our rules, or by those of the `released` code "webgym" or "async_webrl".

    Raises Undecided without a usable answer to any question but relevance, and BudgetSpent.
    """
    by_group = released == "async_webrl"  # its loader loses the reference answer, too
    task, actions, pages = ("TASK", episode.task), ("ACTIONS", episode.actions), ("PAGES", episode.pages)
    fields: tuple[tuple[str, str], ...]
    if episode.answer is not None or not by_group:
        fields = (task, actions, pages) if released else (task, pages)
        shots = episode.evenly_sampled(BLOCKED_SCREENSHOTS)
        blocked = await asker.require(Question("blocked", "relevance", fields, shots, BLOCKED_TOKENS))
        if blocked.yes:
            return Finding(BLOCKED, f"blocked: {blocked.text}")
    if episode.answer is None:
        return NO_ANSWER
    answer = ("ANSWER", episode.answer)
    requirements = [("", group) for group in episode.fact_groups] if by_group else episode.facts
    points = numbered_lines(": ".join(filter(None, each)) for each in requirements)
    listed = (("KEY_POINTS", points),) if released and points else ()
    shots = await _relevant(episode, asker, (task, *listed))
    fields = (task, answer) if released else (task, answer, actions, pages)
    questions = [Question("supported", "verdict", fields, shots, VERDICT_TOKENS)]
    evidence = listed if released else (answer,)
    for number, (description, fact) in enumerate(requirements, 1):
        context = (("RUBRIC", description),) if description else ()
        fields = (task, *evidence, *context, ("FACT", fact), actions)
        subject = f"{'group' if by_group else 'fact'} {number}"
        questions.append(Question("rubric", "verdict", fields, shots, VERDICT_TOKENS, subject))
    if episode.reference is not None and not by_group:
        fields = (task, *evidence, ("REFERENCE", episode.reference), *((actions,) if released else ()))
        questions.append(Question("reference", "verdict", fields, shots, VERDICT_TOKENS))
    fulfilled, first_no = -1, ""  # the first question is no requirement
    for question in questions:
        found = await asker.require(question)
        fulfilled += found.yes
        if not found.yes:
            first_no = first_no or f"{question.subject or question.stage}: {found.text}"
            if not asker.settings.graded or question.stage == "supported":
                return Finding("failure", first_no)
    if first_no:
        return Finding("failure", first_no, fulfilled / (len(questions) - 1))
    return Finding("success", f"{len(questions)} of {len(questions)} questions")


async def _relevant(episode: EpisodeView, asker: Asker, fields: tuple[tuple[str, str], ...]) -> tuple[Screenshot, ...]:
    """The latest relevant screenshots, and always the last one."""
    if not episode.screenshots:
        return ()
    *earlier, last = episode.screenshots
    answers = await _relevance(asker, earlier, fields, RELEVANCE_TOKENS, VERDICT)
    kept = [shot for shot, answer in answers if answer.value is not False]
    return (*kept, last)[-asker.max_screenshots :]


async def _relevance(
    asker: Asker, shots: Sequence[Screenshot], fields: tuple[tuple[str, str], ...], tokens: int, form: ReplyForm
) -> list[tuple[Screenshot, Answer]]:
    """Each screenshot with the answer to the question about its relevance, asked concurrently."""
    questions = [
        Question("relevance", "relevance", fields, (shot,), tokens, f"screenshot {shot.number}", form) for shot in shots
    ]
    return list(zip(shots, await run_together(map(asker.ask, questions)), strict=True))


WEBJUDGE_TOKENS = 512  # of each reply, as published; of AgentTrek's, too
MAX_NOTE_CHARS = 500


async def judge_as_webjudge(episode: EpisodeView, asker: Asker) -> Finding:
    """A screenshot without a usable score is kept. Raises Undecided for the other questions, and BudgetSpent."""
    task = ("TASK", episode.task)
    listed = await asker.require(Question("key_points", "verdict", (task,), (), WEBJUDGE_TOKENS, form=KEY_POINTS))
    points = ("KEY_POINTS", str(listed.value))
    answers = await _relevance(asker, episode.screenshots, (task, points), WEBJUDGE_TOKENS, SCORE)
    kept = [each for each in answers if each[1].value is None or int(each[1].value) >= RELEVANT_SCORE]
    kept = kept[-asker.max_screenshots :]
    notes = [
        f"screenshot {shot.number}: {' '.join(answer.text.split())[:MAX_NOTE_CHARS]}"
        for shot, answer in kept if answer.value is not None
    ]  # fmt: skip
    fields = [task, points, ("ACTIONS", episode.actions)]
    fields += [("ANSWER", episode.answer)] if episode.answer is not None else []
    fields += [("NOTES", "\n".join(notes))] if notes else []
    return await _outcome(asker, fields, [shot for shot, _ in kept], WEBJUDGE_TOKENS)


async def _outcome(
    asker: Asker, fields: Sequence[tuple[str, str]], shots: Sequence[Screenshot], tokens: int
) -> Finding:
    """The verdict of one last question. Raises Undecided and BudgetSpent."""
    outcome = await asker.require(Question("outcome", "verdict", tuple(fields), tuple(shots), tokens))
    return Finding("success" if outcome.yes else "failure", f"outcome: {outcome.text}")


WEBVOYAGER_TOKENS = 1_000  # of the reply, as published


async def judge_as_webvoyager(episode: EpisodeView, asker: Asker) -> Finding:
    if episode.answer is None:
        return NO_ANSWER
    shots = episode.screenshots[-asker.max_screenshots :]
    fields = (("TASK", episode.task), ("ANSWER", episode.answer))
    return await _outcome(asker, fields, shots, WEBVOYAGER_TOKENS)


async def judge_as_agenttrek(episode: EpisodeView, asker: Asker) -> Finding:
    if episode.answer is None:
        return NO_ANSWER
    fields = (("TASK", episode.task), ("TRAJECTORY", episode.trajectory))
    return await _outcome(asker, fields, episode.screenshots[-1:], WEBJUDGE_TOKENS)


RUBRIC_STAGES = ("relevance", "blocked", "supported", "rubric", "reference")


def find_protocol(settings: JudgeConfig) -> JudgeProtocol:
    """The protocol of judge.protocol. Raises ConfigError for an import path of none.

    An import path names a JudgeProtocol, or a function that makes one, with judge.options.
    """
    if not isinstance(settings, OwnProtocolConfig):
        return PROTOCOLS[settings.protocol]
    found = find(settings.protocol, "judge.protocol")
    if not isinstance(found, JudgeProtocol):
        found = find_function(settings.protocol, "judge.protocol", (), settings.options)()
    if not isinstance(found, JudgeProtocol):
        raise ConfigError(f"judge.protocol={settings.protocol} gives {kind_of(found)}, not a JudgeProtocol")
    return found


PROTOCOLS = {
    "rubric": JudgeProtocol("rubric", RUBRIC_STAGES, judge_by_rubric),
    "webgym": JudgeProtocol("webgym", RUBRIC_STAGES, partial(judge_by_rubric, released="webgym")),
    "async_webrl": JudgeProtocol("webgym", RUBRIC_STAGES[:-1], partial(judge_by_rubric, released="async_webrl")),
    "webjudge": JudgeProtocol("webjudge", ("key_points", "relevance", "outcome"), judge_as_webjudge),
    "webvoyager": JudgeProtocol("webvoyager", ("outcome",), judge_as_webvoyager),
    "agenttrek": JudgeProtocol("agenttrek", ("outcome",), judge_as_agenttrek),
}
"""By judge.protocol."""
