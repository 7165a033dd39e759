"""The examples of docs/judge.md, run."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_webrl.config.judge import BudgetConfig, judge_config
from megatron_webrl.config.load import parse_config
from megatron_webrl.judge import client, protocols, questions
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.types import RubricFact
from tests.documented_blocks import blocks_run_by
from tests.documented_commands import command_environment
from tests.judge.support import episode
from tools.judge_endpoint.faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "judge.md").read_text()


def block(language: str) -> str:
    """The code block of a language that runs here."""
    (text,) = blocks_run_by(__file__, "docs/judge.md", language)
    return text


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_example_judges_stored_episodes(tmp_path: Path):
    facts = (RubricFact("1", "price", "12 euros"),)
    answers = ["It costs 12 euros.", "It costs 3 euros.", None, "12 euros"]
    with RecordFileWriter(tmp_path / "stored.records") as file:
        for ticket, answer in enumerate(answers):
            file.write(encode_trajectory(episode(answer, ticket=ticket, facts=facts)))
    labels = ["success", "failure", "failure", "success"]
    lines = [json.dumps({"ticket": n, "index": 0, "label": label}) for n, label in enumerate(labels)]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    port = str(free_port())
    (tmp_path / "judge.yaml").write_text(block("yaml").replace("8765", port))
    done = subprocess.run(
        ["bash", "-eu", "-c", block("bash").replace("8765", port)], cwd=tmp_path, check=False, text=True,
        env=command_environment(), capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["labels"]["accuracy"], found["labels"]["false_success_rate"]) == (1.0, 0.0)
    assert found["cost"]["dollars"] > 0


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [("It costs 12 euros", "12 euros", "success"), ("12 euros " + "or so " * 9, "12 euros", "failure"),
     (None, "12 euros", "failure"), ("12", None, "no_decision")],
)  # fmt: skip
async def test_the_function_of_the_page_is_an_evaluator(
    answer: str | None, reference: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "my_evaluators.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_evaluators", raising=False)
    settings = judge_config(evaluators=["my_evaluators:short_answer"])
    async with open_evaluator(settings, LocalMeter(BudgetConfig())) as evaluator:
        assert (await evaluator.evaluate(episode(answer, reference=reference))).outcome == expected


def test_the_page_names_every_fence_fault_and_number():
    assert ", ".join(questions.NAMES).replace("RUBRIC", "RUBRIC (description of a group of facts)") in " ".join(
        PAGE.split()
    )
    assert f"{questions.MAX_FIELD_CHARS:,} characters" in PAGE
    assert f"{client.IMAGE_TOKENS:,} tokens" in PAGE
    assert f"reply ({questions.MAX_STAGE_TEXT_CHARS:,} characters)" in PAGE
    assert {"truncated", "empty", "refusal", "wrong_schema", "contradictory"} <= set(FAULTS) & set(
        re.findall(r"`(\w+)`", PAGE)
    )
    settings = judge_config()
    for stage, shots, tokens in (
        ("blocked", protocols.BLOCKED_SCREENSHOTS, protocols.BLOCKED_TOKENS),
        ("supported", settings.max_screenshots, protocols.VERDICT_TOKENS),
    ):
        (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| {stage} |")]
        assert str(shots) in row
        assert str(tokens) in row


def test_the_section_of_the_page_is_valid_in_a_configuration(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text("judge:\n" + "".join(f"  {line}\n" for line in block("yaml").splitlines()))
    assert parse_config(path).judge.budget.calls_per_hour == 20000
