"""WebGym in ten steps: the commands of docs/webgym.md that need no cluster, in order."""

from __future__ import annotations

import ast
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.types import BLOCKED, JUDGE_ERROR, TRAINABLE_OUTCOMES
from tests.documented_blocks import blocks_run_by, command_environment
from tests.waiting import started, until

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400)]

ROOT = Path(__file__).parents[2]
PORT = "8017"  # of the judge, in the document and in the configuration
FAULTS = "--faults 0.1 --retry-after 0.2"
OUTAGE_SECONDS = 10.0
LIMIT = 1500.0


def document_commands() -> list[str]:
    """The commands of the steps on one machine."""
    return [block.strip() for block in blocks_run_by(__file__, "docs/webgym.md", "bash")]


class Shell:
    """Runs the document's commands in a folder, with a free port instead of the document's."""

    def __init__(self, folder: Path) -> None:
        for name in ("configs", "models"):
            (folder / name).symlink_to(ROOT / name)
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = str(server.getsockname()[1])
        environment = command_environment()
        environment.pop("MLFLOW_TRACKING_URI", None)
        self.options: dict[str, Any] = {"cwd": folder, "env": environment}

    def command(self, text: str) -> list[str]:
        if text.startswith(("webrl train", "webrl eval", "webrl judge")):
            text += f" judge.verdict.url=http://127.0.0.1:{PORT}/v1"
        if text.startswith("webrl train"):
            text += " judge.attempts=1"  # a faulty reply is asked for again elsewhere; here it masks an episode
            # Half of the time, and the last command evaluates.
            text += " trainer.groups_per_update=2 rollout.groups_in_flight=3 evaluation.after=false"
        return ["bash", "-c", f"exec env {text.replace(PORT, self._port)}"]

    def run(self, text: str) -> str:
        """Output of a command that must succeed."""
        done = subprocess.run(
            self.command(text), capture_output=True, text=True, timeout=LIMIT, check=False, **self.options
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def test_the_steps_train_with_rewards_of_a_judge_that_fails_and_disappears(tmp_path: Path) -> None:
    """A smaller test could not show that verdicts reach rewards, masks and accounts of a whole job."""
    make, check, judge, look, train, account, again, evaluate = document_commands()
    shell, run, log = Shell(tmp_path), tmp_path / "runs" / "webgym_offline", tmp_path / "train.log"
    shell.run(make)
    assert "websites in both files: 0" in shell.run(check)
    assert "evaluators:\n  - judge" in shell.run(look)
    with log.open("w") as output, started(shell.command(train), stderr=output, **shell.options) as job:
        with started(shell.command(f"{judge} {FAULTS}"), **shell.options) as endpoint:
            until(lambda: has_update(run) or job.poll() is not None, log.read_text, LIMIT)
            endpoint.kill()
        time.sleep(OUTAGE_SECONDS)  # connections are refused meanwhile
        with started(shell.command(judge), **shell.options):
            printed = job.communicate(timeout=LIMIT)[0]
            assert job.returncode == 0, printed + log.read_text()
            check_run(run, ast.literal_eval(shell.run(account)))
            assert "agreement" in shell.run(again).lower()
            assert "of all 20" in shell.run(evaluate)


def has_update(run: Path) -> bool:
    file = run / "updates.jsonl"
    return file.is_file() and file.stat().st_size > 0


def check_run(run: Path, accounting: dict[str, Any]) -> None:
    """Check verdicts, masks and accounts of a run."""
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    outcomes = [line["outcome"] for line in lines]
    assert len((run / "updates.jsonl").read_text().splitlines()) >= 5
    assert accounting["matches"]
    assert len(lines) == accounting["trained"] + sum(accounting["dropped"].values())
    for reason in (BLOCKED, JUDGE_ERROR):
        assert accounting["dropped"][reason] == outcomes.count(reason) > 0
    assert {line["verdict"]["protocol"] for line in lines if line["outcome"] in TRAINABLE_OUTCOMES} == {"rubric"}
    records = [record for file in sorted((run / "records").iterdir()) for record in read_record_file(file)]
    trained = [decode_trajectory(record) for record in records]
    assert {each.outcome for each in trained} >= TRAINABLE_OUTCOMES
    for each in trained:
        assert each.verdict is not None
        stages = {stage.name for stage in each.verdict.stages if stage.decision == "yes"}
        assert each.outcome != "success" or {"supported", "rubric", "reference"} <= stages
