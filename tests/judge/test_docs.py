"""The examples of docs/judge.md, run."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest

from megatron_webrl.config.judge import BudgetConfig, judge_config
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.judge.evaluation import open_evaluator
from megatron_webrl.ring.record import RecordFileWriter, encode_trajectory
from megatron_webrl.types import RubricFact
from tests.documented_blocks import blocks_run_by, command_environment
from tests.judge.support import episode


def block(language: str) -> str:
    (text,) = blocks_run_by(__file__, "docs/judge.md", language)
    return text


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_example_judges_stored_episodes(tmp_path: Path):
    facts = (RubricFact("1", "price", "12 euros"),)
    answers = {"It costs 12 euros.": "success", "It costs 3 euros.": "failure", "Twelve": "failure"}
    with (
        RecordFileWriter(tmp_path / "stored.records") as file,
        (tmp_path / "labels.jsonl").open("w") as labels,
    ):
        for ticket, (answer, label) in enumerate(answers.items()):
            file.write(encode_trajectory(episode(answer, ticket=ticket, facts=facts)))
            print(json.dumps({"ticket": ticket, "index": 0, "label": label}), file=labels)
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


async def test_the_function_of_the_page_is_an_evaluator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_evaluators.py").write_text(block("python"))
    monkeypatch.syspath_prepend(tmp_path)
    settings = judge_config(evaluators=["my_evaluators:short_answer"])
    async with open_evaluator(settings, LocalMeter(BudgetConfig())) as evaluator:
        for answer, reference, expected in (
            ("It costs 12 euros", "12 euros", "success"), ("12 euros " + "or so " * 9, "12 euros", "failure"),
            (None, "12 euros", "failure"), ("12", None, "no_decision"),
        ):  # fmt: skip
            assert (await evaluator.evaluate(episode(answer, reference=reference))).outcome == expected
