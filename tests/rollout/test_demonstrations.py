"""Recording demonstrations, and where scripted episodes depart from their scripts."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.load import save_config
from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory, read_record_file
from megatron_webrl.rollout import demonstrations as module
from megatron_webrl.rollout.contexts import format_response, make_context
from megatron_webrl.rollout.demonstrations import (
    FIRST_DEMONSTRATION_TICKET,
    GENERIC_SLOT,
    MEMORY_SLOTS,
    ScriptedGenerator,
    extend_memory,
    memory_text,
    write_demonstrations,
)
from megatron_webrl.types import Action, Trajectory
from tests.rollout.conversations import observation_of, response_of, texts
from tests.waiting import started, until


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


async def recorded(config: Config, count: int, path: Path) -> list[Trajectory]:
    progress: list[int] = []
    await write_demonstrations(config, count, path, progress.append)
    assert progress == list(range(1, count + 1))
    return [decode_trajectory(record) for record in read_record_file(path)]


async def test_the_requested_number_of_successes_is_recorded(tiny_model: Path, tmp_path: Path) -> None:
    for source, environments in (("miniwob", {"click-test", "enter-text"}), ("sites", {"wiki-look-up", "forms-vote"})):
        config = config_for(tiny_model, tmp_path, sorted(environments))
        config.tasks.source = source
        if source == "sites":
            config.browser.width, config.browser.height = 640, 480
        found = await recorded(config, 4, tmp_path / f"{source}.rec")
        assert [each.outcome for each in found] == ["success"] * 4
        assert {each.ticket - FIRST_DEMONSTRATION_TICKET for each in found} == set(range(4))
        assert {each.task.environment for each in found} == environments
        assert len({each.task.seed for each in found}) == 4
        assert not any(step.logprobs.any() or step.versions.any() for each in found for step in each.steps)
        if source == "sites":  # answers are judged
            last = [each.steps[-1].action for each in found]
            answers = [action.text if action and action.kind == "answer" else None for action in last]
            assert [each.task.answer for each in found] == answers


async def test_extra_actions_are_demonstrated_if_enabled_and_what_has_no_script_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "demonstrations.rec"
    for environments, words in (
        (["drag-circle", "choose-list"], "choose-list needs select_option; .*browser.actions"),
        (["click-test", "book-flight"], "demonstrations=4, but book-flight of tasks.environments"),
    ):
        config = config_for(tiny_model, tmp_path, environments, max_new_tokens=128)
        config.trainer.warm_start.demonstrations, config.browser.actions = 4, ["drag"]
        with pytest.raises(ConfigError, match=words):
            await write_demonstrations(config, 4, path)
    config.tasks.environments, config.browser.actions = ["drag-circle", "choose-list"], ["drag", "select_option"]
    found = await recorded(config, 4, path)
    assert [each.outcome for each in found] == ["success"] * 4
    kinds = {step.action.kind for each in found for step in each.steps if step.action}
    assert {"drag", "left_click"} <= kinds <= {"drag", "left_click", "select_option"}


async def test_too_many_failures_raise_and_leave_no_file(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FAILURES", 2)
    config = config_for(tiny_model, tmp_path, ["click-test"], max_new_tokens=4)
    with pytest.raises(RuntimeError, match=r"3 scripted episodes failed, more than 2; last: .*: engine_error"):
        await write_demonstrations(config, 5, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


async def test_with_premature_submits_failed_episodes_are_recorded_too(tiny_model: Path, tmp_path: Path) -> None:
    config = config_for(tiny_model, tmp_path, ["circle-center", "click-test", "click-button-sequence"])
    config.trainer.warm_start.premature_submit_probability = 0.5
    found = await recorded(config, 18, tmp_path / "some.rec")
    premature = [each for each in found if each.outcome == "failure"]
    assert {(each.task.environment, len(each.steps)) for each in premature} == {
        ("circle-center", 1),
        ("click-button-sequence", 2),  # the page ends at the second click, wherever the first one was
    }
    assert {len(each.steps) for each in found if each.outcome == "success"} == {1, 2}


@pytest.mark.parametrize(
    ("number", "ignored"), [(signal.SIGINT, True), pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow)]
)
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
        written = lambda: any(path.stat().st_size > 16 for path in folder.glob(".*.writing"))  # noqa: E731
        until(lambda: written() or process.poll() is not None, "a first episode", 120)
        assert process.poll() is None, process.communicate()[0]
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "interrupted; nothing was written" in output
    assert not list(folder.iterdir())


WORK = [Action("left_click", coordinate=(20 * n, 500)) for n in range(1, 4)]
SUBMIT = Action("left_click", coordinate=(500, 900))
COMPACT = ContextConfig(history_turns=1, compact=True, response_format="memory_compact")


class Page:
    """A page that needs the actions of WORK in turn, then SUBMIT."""

    def __init__(self) -> None:
        self.left = list(WORK)

    async def demonstration(self, premature_submit: bool = False) -> Action:
        return self.left.pop(0) if self.left and not premature_submit else SUBMIT


async def test_a_premature_submit_comes_before_the_work(processor: Processor) -> None:
    bare = ContextConfig(history_turns=1, compact=True)
    settings, context = RolloutConfig(context=bare, max_new_tokens=64), make_context(processor, bare, 1000)
    context.start_episode("Work.", observation_of(0))
    prompt = context.build_prompt()
    for probability, actions in ((0.0, [*WORK, SUBMIT]), (1.0, [SUBMIT])):
        script, page = ScriptedGenerator(processor, settings, premature_submit_probability=probability), Page()
        for action in actions:
            answer = await script.generate(page, prompt.token_ids, context.screenshots)  # type: ignore[arg-type]
            assert answer.text == format_response(action, bare)


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


def test_the_next_compact_prompt_carries_the_memory(processor: Processor) -> None:
    context = make_context(processor, COMPACT, 1000)
    context.start_episode("Work.", observation_of(0))
    assert "Memory" not in texts(processor, context.build_prompt())[1]
    answer = format_response(WORK[0], COMPACT, memory=memory_text([WORK[0].kind]))
    context.add_step(response_of(processor, answer), WORK[0], None, observation_of(1))
    system, user, *_ = texts(processor, context.build_prompt())
    assert "\nMemory: your last notes" in system
    assert user.startswith("Task: Work.\nEarlier steps:\nStep 1: left_click [20, 500] -> page ")
    assert "\nMemory of step 1: left_click;" in user
