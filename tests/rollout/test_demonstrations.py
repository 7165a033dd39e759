"""Recording demonstrations, and where scripted episodes depart from their scripts."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_webrl.browser.server.local_servers import LocalServers
from megatron_webrl.browser.server.protocol import TOKEN_VARIABLE
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.load import save_config
from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.config.trainer import TrainerConfig
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.rollout import demonstrations as module
from megatron_webrl.rollout.demonstrations import (
    FIRST_DEMONSTRATION_TICKET,
    GENERIC_SLOT,
    MEMORY_SLOTS,
    extend_memory,
    memory_text,
    write_demonstrations,
)
from megatron_webrl.types import Action, Trajectory
from tests.waiting import started, until

BROWSER = BrowserConfig(width=640, height=480, screenshot="png", actions=["drag", "select_option"])


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Config]:
    """Of recordings with a browser server of all tests."""
    servers = LocalServers(Config(browser=BROWSER), sessions=8)
    try:
        servers.start()
        until(servers.poll_addresses, "the browser server", 120)
        os.environ[TOKEN_VARIABLE] = servers.token
        yield Config(
            run=RunConfig(directory=str(tmp_path_factory.mktemp("runs"))),
            model=ModelConfig(path=str(tiny_model)),
            rollout=RolloutConfig(
                max_model_len=2048, max_new_tokens=128, operation_timeout_seconds=20,
                context=ContextConfig(history_turns=1, compact=True),
            ),
            browser=replace(BROWSER, servers=",".join(servers.addresses())),
        )  # fmt: skip
    finally:
        servers.close()


def of_tasks(config: Config, *environments: str, source: str = "miniwob") -> Config:
    tasks = tasks_config(source=source, environments=list(environments), max_steps=4)
    return replace(config, tasks=tasks, trainer=TrainerConfig())


async def recorded(config: Config, count: int, path: Path) -> list[Trajectory]:
    progress: list[int] = []
    await write_demonstrations(config, count, path, progress.append)
    assert progress == list(range(1, count + 1))
    return [decode_trajectory(record) for record in read_record_file(path)]


async def test_the_requested_number_of_successes_is_recorded(config: Config, tmp_path: Path) -> None:
    for source, environments in (("miniwob", {"click-test", "enter-text"}), ("sites", {"wiki-look-up", "forms-vote"})):
        found = await recorded(of_tasks(config, *sorted(environments), source=source), 4, tmp_path / f"{source}.rec")
        assert [each.outcome for each in found] == ["success"] * 4
        assert {each.ticket - FIRST_DEMONSTRATION_TICKET for each in found} == set(range(4))
        assert {each.task.environment for each in found} == environments
        assert len({each.task.seed for each in found}) == 4
        assert not any(step.logprobs.any() or step.versions.any() for each in found for step in each.steps)
        if source == "sites":  # answers are judged
            last = [each.steps[-1].action for each in found]
            answers = [action.text if action and action.kind == "answer" else None for action in last]
            assert [each.task.answer for each in found] == answers


async def test_enabled_actions_are_demonstrated_and_others_refused(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "demonstrations.rec"
    for environments, words in (
        (["drag-circle", "choose-list"], "choose-list needs select_option; .*browser.actions"),
        (["click-test", "book-flight"], "demonstrations=4, but book-flight of tasks.environments"),
    ):
        refused = of_tasks(replace(config, browser=replace(config.browser, actions=["drag"])), *environments)
        refused.trainer.warm_start.demonstrations = 4
        with pytest.raises(ConfigError, match=words):
            await write_demonstrations(refused, 4, path)
    found = await recorded(of_tasks(config, "drag-circle", "choose-list"), 4, path)
    assert [each.outcome for each in found] == ["success"] * 4
    kinds = {step.action.kind for each in found for step in each.steps if step.action}
    assert {"drag", "left_click"} <= kinds <= {"drag", "left_click", "select_option"}


async def test_too_many_failures_leave_no_file(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    config = replace(of_tasks(config, "click-test"), rollout=replace(config.rollout, max_new_tokens=4))
    with pytest.raises(RuntimeError, match=r"3 scripted episodes failed, more than 2; last: .*: engine_error"):
        await write_demonstrations(config, 5, tmp_path / "file")
    assert not list(tmp_path.iterdir())


async def test_with_premature_submits_failed_episodes_are_recorded_too(config: Config, tmp_path: Path) -> None:
    config = of_tasks(config, "circle-center", "click-test", "click-button-sequence")
    config.trainer.warm_start.premature_submit_probability = 0.5
    found = await recorded(config, 18, tmp_path / "some.rec")
    premature = [each for each in found if each.outcome == "failure"]
    assert {(each.task.environment, len(each.steps)) for each in premature} == {
        ("circle-center", 1),
        ("click-button-sequence", 2),  # the page ends at the second click, wherever the first one was
    }
    assert {len(each.steps) for each in found if each.outcome == "success"} == {1, 2}


@pytest.mark.slow  # a command with all its imports and browsers
def test_a_signal_ends_the_command_and_leaves_no_partial_file(config: Config, tmp_path: Path) -> None:
    """Also of a command that nohup, cron or a script in the background has started without SIGINT."""
    config, folder = replace(of_tasks(config, "click-test"), browser=BROWSER), tmp_path / "out"
    config.trainer.warm_start.demonstrations = 100_000
    save_config(config, tmp_path / "config.yaml")
    folder.mkdir()
    start = ["env", "--ignore-signal=INT", sys.executable]
    command = [*start, "-m", "megatron_webrl", "demonstrate", str(tmp_path / "config.yaml")]
    with started([*command, "--out", str(folder / "made.records")], stderr=subprocess.STDOUT) as process:
        written = lambda: any(path.stat().st_size > 16 for path in folder.glob(".*.writing"))  # noqa: E731
        until(lambda: written() or process.poll() is not None, "a first episode", 120)
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "interrupted; nothing was written" in output
    assert not list(folder.iterdir())


WORK = [Action("left_click", coordinate=(20 * n, 500)) for n in range(1, 4)]
SUBMIT = Action("left_click", coordinate=(500, 900))


def test_a_scripted_memory_only_grows_and_holds_useful_and_generic_slots() -> None:
    counts = []
    for seed in range(200):
        draw, slots, written = random.Random(seed), list[str](), [""]
        for action in (*WORK, Action("wait", time=0.1)):
            written.append(memory_text(slots := extend_memory(slots, action, draw)))
        assert all(later.startswith(earlier) for earlier, later in pairwise(written))
        assert [slot for slot in slots if slot != GENERIC_SLOT] == [*["left_click"] * 3, "wait"]
        counts.append(slots.count(GENERIC_SLOT) / 4)
    assert sum(counts) / len(counts) == pytest.approx(0.5, abs=0.06)
    for _ in range(20):
        slots = extend_memory(slots, SUBMIT, draw)
    assert len(slots) == MEMORY_SLOTS
