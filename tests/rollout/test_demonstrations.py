"""Recording demonstrations."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.load import save_config
from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.rollout import demonstrations as module
from megatron_webrl.rollout.demonstrations import FIRST_DEMONSTRATION_TICKET, write_demonstrations
from tests.waiting import started


def config_for(model: Path, folder: Path, environments: list[str], max_new_tokens: int = 64) -> Config:
    return Config(
        run=RunConfig(directory=str(folder / "runs")),
        model=ModelConfig(path=str(model)),
        rollout=RolloutConfig(
            max_model_len=1024, max_new_tokens=max_new_tokens, operation_timeout_seconds=20,
            context=ContextConfig(history_turns=1, compact=True),
        ),
        tasks=tasks_config(environments=environments, max_steps=4),
        browser=BrowserConfig(width=160, height=210, screenshot="png"),
    )  # fmt: skip


async def test_the_requested_number_of_successes_is_recorded(tiny_model: Path, tmp_path: Path) -> None:
    progress: list[int] = []
    path = tmp_path / "demonstrations.rec"
    await write_demonstrations(
        config_for(tiny_model, tmp_path, ["click-test", "enter-text"]), 10, path, progress.append
    )
    trajectories = [decode_trajectory(record) for record in read_record_file(path)]
    assert progress == list(range(1, 11))
    assert [trajectory.outcome for trajectory in trajectories] == ["success"] * 10
    assert {trajectory.ticket for trajectory in trajectories} == set(
        range(FIRST_DEMONSTRATION_TICKET, FIRST_DEMONSTRATION_TICKET + 10)
    )
    assert {trajectory.task.environment for trajectory in trajectories} == {"click-test", "enter-text"}
    assert len({trajectory.task.seed for trajectory in trajectories}) == 10
    for trajectory in trajectories:
        assert all(not step.logprobs.any() and not step.versions.any() for step in trajectory.steps)


async def test_tasks_of_the_sites_are_demonstrated_and_their_answers_judged(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tiny_model, tmp_path, ["wiki-look-up", "forms-vote"])
    config.tasks.source = "sites"
    config.browser.width, config.browser.height = 640, 480
    path = tmp_path / "demonstrations.rec"
    await write_demonstrations(config, 6, path)
    trajectories = [decode_trajectory(record) for record in read_record_file(path)]
    assert [trajectory.outcome for trajectory in trajectories] == ["success"] * 6
    assert {trajectory.task.environment for trajectory in trajectories} == {"wiki-look-up", "forms-vote"}
    for trajectory in trajectories:
        last = trajectory.steps[-1].action
        assert last is not None
        assert trajectory.task.answer == (last.text if last.kind == "answer" else None)


async def test_extra_actions_are_demonstrated_if_enabled(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tiny_model, tmp_path, ["drag-circle", "choose-list"], max_new_tokens=128)
    config.trainer.warm_start.demonstrations = 4
    config.browser.actions = ["drag"]
    with pytest.raises(
        ConfigError, match=r"scripted policy of choose-list needs select_option; add it to browser\.actions"
    ):
        await write_demonstrations(config, 4, tmp_path / "file")
    config.browser.actions = ["drag", "select_option"]
    await write_demonstrations(config, 4, tmp_path / "demonstrations.rec")
    trajectories = [decode_trajectory(record) for record in read_record_file(tmp_path / "demonstrations.rec")]
    assert [trajectory.outcome for trajectory in trajectories] == ["success"] * 4
    kinds = {step.action.kind for trajectory in trajectories for step in trajectory.steps if step.action}
    assert {"drag", "left_click"} <= kinds <= {"drag", "left_click", "select_option"}


async def test_an_environment_without_a_scripted_policy_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tiny_model, tmp_path, ["click-test", "book-flight"])
    config.trainer.warm_start.demonstrations = 3
    with pytest.raises(ConfigError, match=r"demonstrations=3, but book-flight of tasks.environments has no script"):
        await write_demonstrations(config, 3, tmp_path / "file")


async def test_too_many_failures_raise_and_leave_no_file(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    with pytest.raises(RuntimeError, match=r"3 scripted episodes failed, more than 2; last: .*: engine_error"):
        await write_demonstrations(
            config_for(tiny_model, tmp_path, ["click-test"], max_new_tokens=4), 5, tmp_path / "file"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


async def test_with_premature_submits_failed_episodes_are_recorded_too(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tiny_model, tmp_path, ["circle-center", "click-test", "click-button-sequence"])
    config.trainer.warm_start.premature_submit_probability = 0.5
    await write_demonstrations(config, 24, tmp_path / "some.rec")
    recorded = [decode_trajectory(record) for record in read_record_file(tmp_path / "some.rec")]
    premature = [t for t in recorded if t.outcome == "failure"]
    assert {(t.task.environment, len(t.steps)) for t in premature} == {
        ("circle-center", 1),
        ("click-button-sequence", 2),  # the page ends at the second click, wherever the first one was
    }
    assert {len(t.steps) for t in recorded if t.outcome == "success"} == {1, 2}
    await write_demonstrations(config, 24, tmp_path / "again.rec")
    outcomes = {t.ticket: t.outcome for t in recorded}
    again = [decode_trajectory(record) for record in read_record_file(tmp_path / "again.rec")]
    assert all(outcomes.get(t.ticket, t.outcome) == t.outcome for t in again)


@pytest.mark.parametrize(("number", "ignored"), [(signal.SIGINT, True), (signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_ends_the_command_and_leaves_no_partial_file(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, ignored: bool
) -> None:
    """Also of a command that nohup, cron or a script in the background has started with SIGINT `ignored`."""
    config, folder = config_for(tiny_model, tmp_path, ["click-test"]), tmp_path / "out"
    config.trainer.warm_start.demonstrations = 100_000
    save_config(config, tmp_path / "config.yaml")
    folder.mkdir()
    start = ["env", "--ignore-signal=INT"] if ignored else []
    command = [*start, sys.executable, "-m", "megatron_webrl", "demonstrate", str(tmp_path / "config.yaml")]
    with started([*command, "--out", str(folder / "made.records")], stderr=subprocess.STDOUT) as process:
        deadline = time.monotonic() + 120
        while not any(path.stat().st_size > 16 for path in folder.glob(".*.writing")):  # more than its head: episodes
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "interrupted; nothing was written" in output
    assert not list(folder.iterdir())
