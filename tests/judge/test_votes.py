"""Several verdicts on an episode: majority, ties, unusable votes, several models, cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from aiohttp import web

from megatron_webrl.config.judge import BudgetConfig, JudgeModelConfig
from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.client import JudgeClient
from megatron_webrl.judge.evaluation import majority_verdict, open_evaluator
from megatron_webrl.judge.verdict_file import settings_digest
from megatron_webrl.types import Verdict, Vote
from tests.judge.support import episode, serving, settings

MAJORITIES = [  # replies, outcome, whether usable votes differ; a reply of neither yes nor no is unusable
    ("yes no yes", "success", True), ("no yes no", "failure", True), ("yes yes", "success", False),
    ("yes no", "judge_error", True), ("yes no ?", "judge_error", True), ("yes ? ?", "judge_error", False),
    ("yes yes ?", "success", False), ("yes ? yes ?", "judge_error", False), ("? ? ?", "judge_error", False),
]  # fmt: skip


async def judged(replies: dict[str, list[str]], meter: LocalMeter, **chosen: object) -> tuple[Verdict, list[str]]:
    """The verdict on an episode, and the models that were asked. `replies`: verdicts by model, in order."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        model = (await request.json())["model"]
        asked.append(model)
        content = json.dumps({"reason": f"{model} says so", "verdict": replies[model].pop(0)})
        choice = {"message": {"content": content}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 10, "completion_tokens": 1}})

    async with serving(handle) as url:
        config = settings(url, protocol="webvoyager", attempts=1, **chosen)
        async with open_evaluator(config, meter) as evaluator:
            return await evaluator.evaluate(episode()), asked


@pytest.mark.parametrize(("replies", "outcome", "differ"), MAJORITIES)
async def test_an_outcome_needs_more_than_half_of_all_votes(replies: str, outcome: str, differ: bool):
    votes, meter = replies.split(), LocalMeter(BudgetConfig(calls_per_hour=100))
    verdict, _ = await judged({"oracle": list(votes)}, meter, votes=len(votes))
    assert (verdict.outcome, verdict.votes_differ, verdict.protocol) == (outcome, differ, "webvoyager")
    names = {"yes": "success", "no": "failure", "?": "judge_error"}
    assert sorted(vote.outcome for vote in verdict.votes) == sorted(names[vote] for vote in votes)
    assert verdict.reason.startswith("votes: ")
    tied = outcome == "judge_error" and 2 * votes.count("?") <= len(votes)
    assert ("no majority" in verdict.reason) == tied
    assert {stage.subject for stage in verdict.stages} == {f"vote {n}" for n in range(1, len(votes) + 1)}
    assert verdict.calls == meter.used.calls == len(votes)  # the budget counts every vote
    assert verdict.prompt_tokens == 10 * len(votes)


def test_the_credit_of_a_failure_is_the_mean_of_the_votes_for_it():
    votes = [Verdict(outcome, "judge", credit=credit) for outcome, credit in
             (("failure", 0.5), ("failure", 0.25), ("success", 0.0))]  # fmt: skip
    assert majority_verdict([("m", vote) for vote in votes]).credit == 0.375
    assert majority_verdict([("m", vote) for vote in votes[1:]]).credit == 0.0


async def test_several_models_vote_each_as_often_and_one_verdict_has_no_votes():
    others = [JudgeModelConfig("second"), JudgeModelConfig("third", output_price=5.0)]
    replies = {"oracle": ["yes", "no"], "second": ["no", "no"], "third": ["yes", "no"]}
    verdict, asked = await judged(replies, LocalMeter(BudgetConfig()), voters=others, votes=2)
    assert sorted(asked) == sorted(2 * ["oracle", "second", "third"])
    assert (verdict.outcome, verdict.votes_differ) == ("failure", True)
    assert [vote.model for vote in verdict.votes] == 2 * ["oracle", "second", "third"]
    assert [vote for vote in verdict.votes if vote.model == "second"] == 2 * [Vote("second", "failure")]
    assert [stage.model for stage in verdict.stages] == 2 * ["oracle", "second", "third"]
    # 1 dollar for a million prompt tokens of the first model, 2 and 5 for one of responses
    assert verdict.dollars == pytest.approx((2 * (10 + 2) + 2 * 5) / 1e6)
    verdict, asked = await judged({"oracle": ["yes"]}, LocalMeter(BudgetConfig()))
    assert (verdict.outcome, verdict.votes, asked) == ("success", (), ["oracle"])


async def test_votes_stay_in_a_verdict_that_another_evaluator_decides():
    async def handle(request: web.Request) -> web.Response:
        choice = {"message": {"content": '{"reason": "a", "verdict": "no"}'}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    async with serving(handle) as url:
        chosen = settings(url, protocol="webvoyager", votes=2, evaluators=["judge", "page"], combine="any")
        async with open_evaluator(chosen, LocalMeter(BudgetConfig())) as evaluator:
            verdict = await evaluator.evaluate(episode(page_reward=1.0, reference=None))
    assert (verdict.outcome, verdict.votes) == ("success", 2 * (Vote("oracle", "failure"),))


def test_voters_are_settings_and_change_what_a_verdict_means(tmp_path: Path):
    path = tmp_path / "judge.yaml"
    section = {"protocol": "webvoyager", "votes": 3, "voters": [{"name": "o4-mini", "options": {"temperature": None}}]}
    path.write_text(yaml.safe_dump({"judge": section}))
    config = parse_config(path)
    assert config.judge.voters == [JudgeModelConfig("o4-mini", options={"temperature": None})]
    save_config(config, path)
    assert parse_config(path).judge == config.judge
    other = parse_config(path, ["judge.voters=[{name: gpt-4.1}]"]).judge
    more = parse_config(path, ["judge.votes=5"]).judge
    assert len({settings_digest(each) for each in (config.judge, other, more)}) == 3
    moved = parse_config(
        path, ["judge.voters=[{name: o4-mini, url: 'http://y/v1', options: {temperature: null}}]"]
    ).judge
    assert settings_digest(moved) == settings_digest(config.judge)  # endpoints may move


def test_votes_that_cannot_be_given_are_refused():
    zero = JudgeModelConfig("m", "http://x/v1", options={"temperature": 0})
    for chosen, words in (
        ({"voters": [JudgeModelConfig(url="http://y/v1")]}, r"judge.voters\[0\].name is empty"),
        ({"voters": [JudgeModelConfig("m", "nowhere")]}, r"judge.voters\[0\].url=nowhere is not an endpoint"),
        ({"votes": 0}, "judge.votes=0 must be at least 1"),
        ({"votes": 3, "verdict": zero}, "judge.votes=3 repeats the verdicts of m at temperature 0"),
        ({"votes": 3, "voters": [zero]}, "judge.votes=3 repeats the verdicts of m at temperature 0"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            check_sections(settings("http://x/v1", **chosen), "judge.")


async def test_a_limit_in_dollars_needs_the_price_of_every_voter():
    budget = BudgetConfig(dollars_per_hour=5)
    for price in (0.0, 1.0):
        voters = [JudgeModelConfig("other", output_price=price)]
        config = settings("http://x/v1", protocol="webvoyager", budget=budget, voters=voters)
        if price:
            async with open_evaluator(config, LocalMeter(budget)):
                pass
            continue
        with pytest.raises(ConfigError, match=r"judge.voters\[0\].input_price"):
            async with open_evaluator(config, LocalMeter(budget)):
                pass


def test_a_voter_without_an_endpoint_uses_that_of_the_first_model():
    config = settings("http://x/v1", voters=[JudgeModelConfig("a"), JudgeModelConfig("b", "http://y/v1")])
    models = JudgeClient(config, LocalMeter(BudgetConfig())).models
    assert [models[slot].url for slot in ("voters[0]", "voters[1]")] == ["http://x/v1", "http://y/v1"]
