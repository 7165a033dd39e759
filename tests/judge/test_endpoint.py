"""The endpoint for tests: recognises questions, injects reproducible faults, dies with its parent."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.judge.support import ScriptedOracle, endpoint_of, episode, judging
from tests.waiting import until
from tools.judge_endpoint.faults import FAULTS, FaultPlan, parse_faults
from tools.judge_endpoint.oracle import TextOracle
from tools.judge_endpoint.process import ROOT, endpoint_process, stats_of


def test_faults_are_drawn_by_seed_request_and_count_at_their_rates():
    rates = parse_faults("0.6")
    plans = [FaultPlan(rates, seed) for seed in (1, 1, 2)]
    drawn = [[plan.draw(f"digest {n % 50}") for n in range(6000)] for plan in plans]
    assert drawn[0] == drawn[1] != drawn[2]
    assert plans[0].counts == Counter(fault for fault in drawn[0] if fault)
    for fault in FAULTS:
        assert plans[0].counts[fault] == pytest.approx(300, rel=0.25)
    again = FaultPlan(rates, 1)
    assert [again.draw("digest 7") for _ in range(120)] == drawn[0][7::50]  # whatever the other requests are


@pytest.mark.parametrize(
    ("text", "found"),
    [("0", dict.fromkeys(FAULTS, 0.0)), ("hang=0.5,empty=0.25", {"hang": 0.5, "empty": 0.25})],
)  # fmt: skip
def test_rates_are_given_together_or_by_kind(text: str, found: dict[str, float]):
    assert parse_faults(text) == found


@pytest.mark.parametrize("text", ["x", "1.5", "-0.1", "hangs=0.1", "hang=0.6,empty=0.6", "hang"])
def test_invalid_rates_are_refused(text: str):
    with pytest.raises(ValueError, match="--faults="):
        parse_faults(text)


@pytest.mark.parametrize(
    ("stage", "fields", "expected"),
    [
        ("blocked", {}, False),
        ("supported", {}, True),
        ("rubric", {"FACT": "12  Euros", "ANSWER": "It costs 12 euros."}, True),
        ("rubric", {"FACT": "13 euros", "ANSWER": "It costs 12 euros."}, False),
        ("reference", {"REFERENCE": "blue", "ANSWER": "BLUE"}, True),
    ],
)
def test_the_text_oracle_compares_texts(stage: str, fields: dict[str, str], expected: bool):
    assert TextOracle().decide(stage, fields, []) is expected


async def test_a_request_that_is_no_question_is_refused():
    async with endpoint_of(ScriptedOracle()) as (url, _), aiohttp.ClientSession() as http:
        for body in ({}, [], {"messages": [{"role": "user", "content": "hi"}]}):
            async with http.post(f"{url}/chat/completions", json=body) as reply:
                assert reply.status == 400
                assert "only answers the judge's questions" in (await reply.json())["error"]["message"]
        async with http.get(f"{url}/models") as reply:
            assert (await reply.json())["data"][0]["id"] == "oracle"


async def test_the_endpoint_counts_requests_replies_and_faults():
    async with judging(ScriptedOracle(), faults={"empty": 0.3}, seed=4) as (evaluator, endpoint):
        await evaluator.evaluate(episode())
        stats: dict[str, Any] = endpoint.stats()
    assert stats["requests"] == sum(stats["replies"].values()) + stats["faults"]["empty"]
    assert stats["replies"] == {"blocked": 1, "relevance": 2, "supported": 1, "rubric": 2, "reference": 1}


def test_the_process_answers_and_dies_with_its_parent(tmp_path: Path):
    with endpoint_process(tmp_path) as url:
        assert stats_of(url) == {"requests": 0, "replies": {}, "faults": {}, "most_in_flight": 0}
    address = tmp_path / "child.json"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-m', 'tools.judge_endpoint', '--address-file', '{address}'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        until(address.exists, "the endpoint")
        parent.kill()
    until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the end of the endpoint", 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--oracle", "no.such:thing"], "--oracle=no.such:thing is not module:factory"),
        (["--faults", "hangs=1"], "unknown kind hangs"),
    ],
)
def test_invalid_options_end_the_process_with_one_line(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from tools.judge_endpoint.__main__ import main

    monkeypatch.setattr(sys, "argv", ["judge_endpoint", *options])
    assert main() == 2
    assert message in capsys.readouterr().err
