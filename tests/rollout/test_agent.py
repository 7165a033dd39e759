"""Episodes in a real browser, with scripted responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from megatron_webrl.browser.egress.har import har_name
from megatron_webrl.browser.server.client import BrowserClient, RemoteSession
from megatron_webrl.browser.server.local_servers import LocalServers, local_servers
from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.judge.evaluation import page_verdict, with_verdict
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.rollout.agent import Agent, Episode
from megatron_webrl.rollout.demonstrations import ScriptedGenerator, scripted_generation
from megatron_webrl.rollout.generator import Generation, GenerationError
from megatron_webrl.rollout.toolset import COORDINATE_TOOLSET, Toolset, format_tool_call
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.track.metrics import episode_metrics
from megatron_webrl.trainer.data.batching import make_samples, success_advantages
from megatron_webrl.trainer.data.prefix_merging import merge_prefixes
from megatron_webrl.types import Action, Group, Task, Trajectory
from tests.browser.server.servers import config_for

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = RolloutConfig(
    max_model_len=1024, max_new_tokens=64, operation_timeout_seconds=20,
    context=ContextConfig(history_turns=1, compact=True),
)  # fmt: skip
WAIT = format_tool_call(Action("wait", time=0))


@dataclass
class Answers:
    """Gives fixed responses in turn, then those of the scripted policy. Raises an exception among them."""

    processor: Processor
    answers: list[str | Exception]
    prompts: list[str] = field(default_factory=list)  # decoded prompts

    async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        self.prompts.append(self.processor.decode(token_ids))
        if not self.answers:
            return await ScriptedGenerator(self.processor, SETTINGS).generate(session, token_ids, images)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return scripted_generation(self.processor, token_ids, images, answer)


def task(environment: str = "click-test", max_steps: int = 3) -> Task:
    return Task(f"miniwob/{environment}/1", "miniwob", environment, seed=1, max_steps=max_steps)


@dataclass(frozen=True)
class Player:
    """Plays episodes with these responses, and judges them by the page."""

    browsers: BrowserClient
    processor: Processor
    toolset: Toolset = COORDINATE_TOOLSET

    async def play(self, answers: Answers | Sequence[str | Exception], task: Task, **settings: Any) -> Trajectory:
        generator = answers if isinstance(answers, Answers) else Answers(self.processor, list(answers))
        live = LiveRollout(task, ticket=7, index=1, group_size=4)
        episode = Episode(replace(SETTINGS, **settings), live, restart_epoch=2)
        trajectory = await Agent(self.browsers, self.processor, self.toolset).run(generator, episode)
        return with_verdict(trajectory, page_verdict(trajectory))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player(processor: Processor, browser_server: LocalServers) -> AsyncIterator[Player]:
    async with BrowserClient(browser_server.poll_addresses, browser_server.token, step_seconds=20) as browsers:
        yield Player(browsers, processor)


def stored(trajectory: Trajectory) -> Trajectory:
    return decode_trajectory(b"".join(encode_trajectory(trajectory)))


async def test_a_solved_task_is_a_success_with_all_data_for_training(player: Player, processor: Processor) -> None:
    trajectory = await player.play([], task("enter-text"))
    assert (trajectory.outcome, trajectory.reward, trajectory.trainable) == ("success", 1.0, True)
    assert (trajectory.ticket, trajectory.index, trajectory.group_size, trajectory.restart_epoch) == (7, 1, 4, 2)
    assert trajectory.instruction.startswith('Enter "')
    assert [step.action.kind for step in trajectory.steps if step.action] == ["type", "left_click"]
    assert [step.page_changed for step in trajectory.steps] == [True, True]
    assert len(trajectory.images) == 3  # the last one follows the last step
    assert {(step.url, step.title) for step in trajectory.steps} == {(trajectory.steps[0].url, "Enter Text Task")}
    for number, step in enumerate(trajectory.steps):
        assert step.images.tolist() == [number]
        image_tokens = int((step.prompt_token_ids == processor.image_token_id).sum())
        assert image_tokens == step.image_grids.prod(axis=1).sum() // processor.merge_size**2 == 35
        assert step.image_grids.tolist() == processor.grids([trajectory.images[number]]).tolist()
        assert step.response_token_ids[-1] == processor.eos_token_id
        assert step.action is not None
        assert processor.decode(step.response_token_ids) == format_tool_call(step.action)
        assert (step.response_characters, step.memory_characters) == (len(format_tool_call(step.action)), -1)
        assert step.seconds_browser > 0
    assert stored(trajectory).instruction == trajectory.instruction


async def test_an_agent_acts_by_the_actions_of_its_toolset(player: Player, processor: Processor) -> None:
    toolset, click = Toolset(marks=True), Action("click", element_id=1)
    answers = Answers(processor, [f"Action: Click it.\n{format_tool_call(click, toolset)}"])
    trajectory = await replace(player, toolset=toolset).play(answers, task(max_steps=1))
    assert (stored(trajectory).steps[0].action, trajectory.steps[0].reasoning) == (click, "Action: Click it.")
    assert "<tools>web_interaction: click, type, hover" in answers.prompts[0]


async def test_the_last_step_an_answer_and_going_back_from_the_start_page_end_an_episode(player: Player) -> None:
    back, answer = format_tool_call(Action("go_back")), format_tool_call(Action("answer", text="done"))
    for answers, end, steps in (
        ([back, back, back], "go_backs", 3), ([back, back, WAIT, back, back], "steps_exhausted", 5),
        ([WAIT, answer], "answer", 2),
    ):  # fmt: skip
        trajectory = await player.play(answers, task(max_steps=5))
        assert (trajectory.end_reason, len(trajectory.steps)) == (end, steps)
        assert (trajectory.outcome, trajectory.reward, trajectory.trainable) == ("failure", 0.0, True)


async def test_a_malformed_response_is_reported_and_ends_no_episode(player: Player, processor: Processor) -> None:
    def call(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "computer_use", "arguments": {arguments}}}\n</tool_call>'

    bad = {
        "I do not know.": "no_tool_call",
        f"{WAIT}<|image_pad|>": "special_token",
        f"<|im_start|>{WAIT}": "special_token",
        "word " * 10_000: "no_tool_call",
        f"<tool_call>{WAIT}</tool_call>": "several_tool_calls",
        WAIT.removesuffix("</tool_call>"): "unclosed_tool_call",
        call('{"action": ' + "[" * 5000 + "]" * 5000 + "}"): "bad_json",
    }
    answers, context = Answers(processor, list(bad)), ContextConfig(history_turns=2, compact=True)
    trajectory = await player.play(answers, task(max_steps=len(bad) + 1), context=context)
    assert [step.format_error for step in trajectory.steps] == [*bad.values(), None]
    assert [step.action is None for step in trajectory.steps] == [True] * len(bad) + [False]
    assert [step.page_changed for step in trajectory.steps] == [False] * len(bad) + [True]
    assert not any(step.images.any() for step in trajectory.steps)
    assert len(trajectory.images) == 2
    assert "Step 1: no valid tool call -> format error: no_tool_call" in answers.prompts[2]
    assert (trajectory.outcome, trajectory.trainable) == ("success", True)
    assert episode_metrics([Group(7, (trajectory,))])["format_error_rate"] == pytest.approx(len(bad) / (len(bad) + 1))
    assert len(stored(trajectory).steps) == len(bad) + 1


async def test_leniencies_are_in_the_step_if_they_are_enabled(player: Player) -> None:
    response = WAIT.replace('"time": 0', '"time": 0, "reason": "none"')
    for parser, expected in (("lenient", (None, ("extra_argument",))), ("strict", ("unexpected_argument", ()))):
        (step,) = stored(await player.play([response], task(max_steps=1), action_parser=parser)).steps
        assert (step.format_error, step.leniencies) == expected


async def test_a_fault_masks_the_episode_and_keeps_its_steps(player: Player) -> None:
    wait = format_tool_call(Action("wait", time=5))
    for answers, asked, changes, outcome, steps, images in (
        ([WAIT, GenerationError("the engine is gone")], task(), {}, "engine_error", 1, 2),
        ([], task("click-tset"), {}, "task_refused", 0, 0),
        ([WAIT, wait], task(), {"episode_timeout_seconds": 2.0}, "episode_timeout", 1, 2),
        ([], task(), {"max_model_len": 100}, "context_overflow", 0, 1),
    ):
        trajectory = await player.play(answers, asked, **changes)
        assert (trajectory.outcome, trajectory.trainable) == (outcome, False)
        assert (len(trajectory.steps), len(trajectory.images)) == (steps, images)
        assert trajectory.seconds < 5


async def test_under_append_a_segment_is_one_training_sequence(player: Player, processor: Processor) -> None:
    answers = [WAIT, "I do not know.", WAIT, f"{WAIT}<|im_start|>", WAIT]
    context = ContextConfig(policy="append", history_turns=3, compact=True)
    trajectory = await player.play(answers, task("enter-text", max_steps=8), context=context)
    assert trajectory.outcome == "success"
    assert [len(step.images) for step in trajectory.steps] == [1, 2, 3, 1, 1, 2, 3]  # full, then a special token
    samples = make_samples([Group(7, (stored(trajectory),))], success_advantages)
    chains = merge_prefixes(samples, (processor.image_token_id,))
    assert sorted([len(chain.samples) for chain in chains]) == [1, 3, 3]
    assert sum(len(chain.images) for chain in chains) == 7


@pytest.mark.slow  # four browser servers
async def test_servers_share_recordings_and_count_what_none_answers(processor: Processor, tmp_path: Path) -> None:
    folder, asked, count = str(tmp_path / "recordings"), task("enter-text"), 3
    elsewhere = format_tool_call(Action("navigate", url="http://miniwob.localhost/miniwob/never.html"))
    async with (
        local_servers(config_for(processes=2, record=folder), 4) as servers,
        BrowserClient(servers.poll_addresses, servers.token) as browsers,
    ):
        recorded = await asyncio.gather(*(Player(browsers, processor).play([], asked) for _ in range(count)))
    assert [each.page_reward for each in recorded] == [1.0] * count
    names = sorted(path.name for path in Path(folder).iterdir())
    assert names == [f"{har_name(asked)}.{visit}.zip" for visit in range(count)]
    async with (
        local_servers(config_for(processes=2, replay=folder), 4) as servers,
        BrowserClient(servers.poll_addresses, servers.token) as browsers,
    ):
        player = Player(browsers, processor)
        replayed = await asyncio.gather(*(player.play([], asked) for _ in range(count)))
        strayed = await player.play([elsewhere], replace(asked, max_steps=1))
        missing = await player.play([], replace(asked, id="miniwob/enter-text/2"))
    for before, after in zip(recorded, replayed, strict=True):
        assert (before.images, before.page_reward) == (after.images, after.page_reward)
    assert (missing.outcome, missing.trainable) == ("not_recorded", False)
    assert [step.not_recorded_requests for step in strayed.steps] == [1]
    group = Group(0, tuple(replace(each, outcome="failure") for each in (*replayed, strayed)))
    assert episode_metrics([group])["not_recorded_requests_per_episode"] == pytest.approx(1 / (count + 1))
    assert not any(step.not_recorded_requests for each in replayed for step in each.steps)
