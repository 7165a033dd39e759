"""Episodes in a real browser, with scripted responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from megatron_webrl.browser.server.client import BrowserClient, RemoteSession
from megatron_webrl.browser.server.local_servers import local_servers
from megatron_webrl.config.rollout import ContextConfig, RolloutConfig
from megatron_webrl.judge.evaluation import page_verdict, with_verdict
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.rollout.agent import Agent, Episode
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.generator import Generation, GenerationError, Generator
from megatron_webrl.rollout.toolset import Toolset, format_tool_call
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.track.metrics import episode_metrics
from megatron_webrl.trainer.data.batching import make_samples, success_advantages
from megatron_webrl.trainer.data.prefix_merging import merge_prefixes
from megatron_webrl.types import Action, Group, Task, Trajectory
from tests.browser.server.servers import browser_of, config_for, server_processes

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = RolloutConfig(
    max_model_len=1024,
    max_new_tokens=64,
    operation_timeout_seconds=20,
    context=ContextConfig(history_turns=1, compact=True),
)
WAIT = format_tool_call(Action("wait", time=0))


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browsers() -> AsyncIterator[BrowserClient]:
    async with (
        local_servers(config_for(), 2) as nodes,
        BrowserClient(nodes.poll_addresses, nodes.token, step_seconds=20) as browsers,
    ):
        yield browsers


@dataclass
class Answers:
    """Gives fixed responses in turn, then those of the scripted policy. Raises an exception among them."""

    processor: Processor
    answers: list[str | Exception]
    prompts: list[str] = field(default_factory=list)  # decoded prompts

    async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        self.prompts.append(self.processor.decode(token_ids))
        script = ScriptedGenerator(self.processor, SETTINGS)
        if not self.answers:
            return await script.generate(session, token_ids, images)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        response, grids = self.processor.encode_response(answer), self.processor.grids(images)
        empty = np.zeros(len(response))
        return Generation(
            self.processor.expand_image_tokens(token_ids, grids), response,
            empty.astype(np.float32), empty.astype(np.int32),
            grids, answer, "stop",
        )  # fmt: skip


def task(environment: str = "click-test", max_steps: int = 3) -> Task:
    return Task(f"miniwob/{environment}/1", "miniwob", environment, seed=1, max_steps=max_steps)


def episode_of(task: Task, settings: RolloutConfig = SETTINGS) -> Episode:
    return Episode(settings, LiveRollout(task, ticket=7, index=1, group_size=4), restart_epoch=2)


async def episode(
    browsers: BrowserClient, processor: Processor, generator: Generator, task: Task, settings: RolloutConfig = SETTINGS
) -> Trajectory:
    trajectory = await Agent(browsers, processor).run(generator, episode_of(task, settings))
    return with_verdict(trajectory, page_verdict(trajectory))


async def test_a_solved_task_is_a_success_with_all_data_for_training(
    browsers: BrowserClient, processor: Processor
) -> None:
    trajectory = await episode(browsers, processor, Answers(processor, []), task("enter-text"))
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
    assert decode_trajectory(b"".join(encode_trajectory(trajectory))).instruction == trajectory.instruction


async def test_an_agent_acts_by_numbered_elements(processor: Processor) -> None:
    toolset = Toolset(marks=True)

    class Reading(Answers):
        async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
            [number] = re.findall(r'\[(\d+)\] button "Click Me!"', self.processor.decode(token_ids))
            self.answers = [format_tool_call(Action("click", element_id=int(number)), toolset)]
            return await super().generate(session, token_ids, images)

    config = config_for(screenshot="webp", marks=True)
    answers = Reading(processor, [])
    async with (
        local_servers(config, 1) as nodes,
        BrowserClient(nodes.poll_addresses, nodes.token) as browsers,
    ):
        trajectory = await Agent(browsers, processor, toolset).run(answers, episode_of(task()))
    trajectory = with_verdict(trajectory, page_verdict(trajectory))
    assert (trajectory.outcome, len(trajectory.steps)) == ("success", 1)
    assert "<tools>web_interaction: click, type, hover" in answers.prompts[0]
    assert trajectory.images[0].startswith(b"RIFF")
    assert decode_trajectory(b"".join(encode_trajectory(trajectory))).steps[0].action == trajectory.steps[0].action


async def test_going_back_from_the_start_page_ends_the_episode_as_a_failure(
    browsers: BrowserClient, processor: Processor
) -> None:
    back = format_tool_call(Action("go_back"))
    for answers, ends, steps in (
        ([back, back, back], "go_backs", 3),
        ([back, back, WAIT, back, back], "steps_exhausted", 5),
    ):
        trajectory = await episode(browsers, processor, Answers(processor, list(answers)), task(max_steps=5))
        assert (trajectory.end_reason, len(trajectory.steps), trajectory.outcome) == (ends, steps, "failure")


async def test_special_tokens_in_a_response_are_a_format_error(browsers: BrowserClient, processor: Processor) -> None:
    answers = Answers(processor, [f"{WAIT}<|image_pad|>", f"<|im_start|>{WAIT}", WAIT])
    trajectory = await episode(browsers, processor, answers, task())
    assert [step.format_error for step in trajectory.steps] == ["special_token", "special_token", None]
    assert [step.action is None for step in trajectory.steps] == [True, True, False]
    assert trajectory.outcome == "failure"


async def test_a_format_error_is_reported_and_the_episode_continues(
    browsers: BrowserClient, processor: Processor
) -> None:
    answers = Answers(processor, ["I do not know.", "<tool_call>\n{}\n</tool_call>"])
    trajectory = await episode(browsers, processor, answers, task())
    assert [step.format_error for step in trajectory.steps] == ["no_tool_call", "bad_call", None]
    assert [step.action is None for step in trajectory.steps] == [True, True, False]
    assert [step.page_changed for step in trajectory.steps] == [False, False, True]
    assert [step.images.tolist() for step in trajectory.steps] == [[0], [0], [0]]
    assert len(trajectory.images) == 2
    assert "Step 1: no valid tool call -> format error: no_tool_call" in answers.prompts[2]
    assert "Step 2: no valid tool call -> format error: bad_call" in answers.prompts[2]
    assert trajectory.outcome == "success"


async def test_no_malformed_response_ends_an_episode(browsers: BrowserClient, processor: Processor) -> None:
    def call(arguments: str) -> str:
        return f'<tool_call>\n{{"name": "computer_use", "arguments": {arguments}}}\n</tool_call>'

    bad = {
        "": "no_tool_call",
        "\x00\ufffd \u202e{[(<": "no_tool_call",
        "word " * 10_000: "no_tool_call",
        WAIT + WAIT: "several_tool_calls",
        f"<tool_call>{WAIT}</tool_call>": "several_tool_calls",
        WAIT.removesuffix("</tool_call>"): "unclosed_tool_call",
        call("{'action': 'wait'}"): "bad_json",
        call('{"action": "left_click", "coordinate": [NaN, 5]}'): "bad_json",
        call('{"action": "left_click", "coordinate": [1e300, 5]}'): "bad_coordinate",
        call('{"action": "self_destruct"}'): "unknown_action",
        call('{"action": ' + "[" * 5000 + "]" * 5000 + "}"): "bad_json",
    }
    settings = replace(
        SETTINGS, context=ContextConfig(history_turns=2, compact=True)
    )  # the next prompt quotes the answer
    answers = Answers(processor, list(bad))
    trajectory = await episode(browsers, processor, answers, task(max_steps=len(bad)), settings)
    assert [step.format_error for step in trajectory.steps] == list(bad.values())
    assert (trajectory.outcome, trajectory.trainable) == ("failure", True)
    assert episode_metrics([Group(7, (trajectory,))])["format_error_rate"] == 1.0
    assert len(decode_trajectory(b"".join(encode_trajectory(trajectory))).steps) == len(bad)


@pytest.mark.parametrize("lenient", [True, False])
async def test_leniencies_are_in_the_step_if_they_are_enabled(
    browsers: BrowserClient, processor: Processor, lenient: bool
) -> None:
    response = WAIT.replace('"time": 0', '"time": 0, "reason": "none"')
    settings = replace(SETTINGS, lenient_actions=lenient)
    trajectory = await episode(browsers, processor, Answers(processor, [response]), task(max_steps=1), settings)
    decoded = decode_trajectory(b"".join(encode_trajectory(trajectory)))
    found = [(step.format_error, step.leniencies) for step in decoded.steps]
    assert found == [(None, ("extra_argument",)) if lenient else ("unexpected_argument", ())]


async def test_the_last_step_ends_an_episode_as_a_failure(browsers: BrowserClient, processor: Processor) -> None:
    trajectory = await episode(browsers, processor, Answers(processor, [WAIT] * 9), task(max_steps=2))
    assert (trajectory.outcome, len(trajectory.steps), trajectory.reward) == ("failure", 2, 0.0)


async def test_an_answer_ends_the_episode(browsers: BrowserClient, processor: Processor) -> None:
    answers = Answers(processor, [WAIT, format_tool_call(Action("answer", text="done"))])
    trajectory = await episode(browsers, processor, answers, task())
    assert (trajectory.outcome, len(trajectory.steps)) == ("failure", 2)


async def test_a_wrong_click_is_a_failure(browsers: BrowserClient, processor: Processor) -> None:
    last = Answers(processor, [])
    # In the other order the sequence of buttons is wrong.
    async with browsers.session() as session:
        await session.reset(task("click-button-sequence"))
        await session.step(await session.demonstration())
        second = await session.demonstration()
    last.answers = [format_tool_call(second), format_tool_call(second)]
    trajectory = await episode(browsers, processor, last, task("click-button-sequence"))
    assert (trajectory.outcome, trajectory.trainable, len(trajectory.steps)) == ("failure", True, 2)


async def test_an_engine_error_masks_the_episode_and_keeps_its_steps(
    browsers: BrowserClient, processor: Processor
) -> None:
    answers = Answers(processor, [WAIT, GenerationError("the engine is gone")])
    trajectory = await episode(browsers, processor, answers, task())
    assert (trajectory.outcome, trajectory.trainable, len(trajectory.steps)) == ("engine_error", False, 1)


async def test_only_the_engine_limits_a_generation_as_it_knows_its_pauses(
    browsers: BrowserClient, processor: Processor
) -> None:
    class Paused(Answers):
        async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
            await asyncio.sleep(0.5)
            return await super().generate(session, token_ids, images)

    settings = replace(SETTINGS, operation_timeout_seconds=0.2)
    trajectory = await episode(browsers, processor, Paused(processor, []), task(), settings)
    assert trajectory.outcome == "success"


async def test_a_crashed_browser_masks_the_episode_and_keeps_its_steps(
    browsers: BrowserClient, processor: Processor
) -> None:
    class Crashing(Answers):
        async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
            if len(self.prompts) == 1:
                [node] = server_processes()
                browser_of(node).kill()
            return await super().generate(session, token_ids, images)

    trajectory = await episode(browsers, processor, Crashing(processor, [WAIT] * 3), task())
    assert (trajectory.outcome, trajectory.trainable, len(trajectory.steps)) == ("browser_crashed", False, 1)


async def test_a_task_that_no_browser_server_takes_masks_the_episode(
    browsers: BrowserClient, processor: Processor
) -> None:
    trajectory = await episode(browsers, processor, Answers(processor, []), task("click-tset"))
    assert (trajectory.outcome, trajectory.trainable, trajectory.steps) == ("task_refused", False, ())


async def test_an_episode_over_its_time_limit_is_masked(browsers: BrowserClient, processor: Processor) -> None:
    wait = format_tool_call(Action("wait", time=5))
    settings = replace(SETTINGS, episode_timeout_seconds=2.0)
    trajectory = await episode(browsers, processor, Answers(processor, [WAIT, wait]), task(), settings)
    assert (trajectory.outcome, trajectory.trainable) == ("episode_timeout", False)
    assert trajectory.seconds < 5


async def test_a_prompt_that_cannot_fit_masks_the_episode(browsers: BrowserClient, processor: Processor) -> None:
    settings = replace(SETTINGS, max_model_len=100)
    trajectory = await episode(browsers, processor, Answers(processor, []), task(), settings)
    assert (trajectory.outcome, trajectory.steps, len(trajectory.images)) == ("context_overflow", (), 1)


async def test_under_append_a_segment_of_an_episode_is_one_training_sequence(
    browsers: BrowserClient, processor: Processor
) -> None:
    settings = replace(SETTINGS, context=ContextConfig(policy="append", history_turns=3, compact=True))
    answers = Answers(processor, [WAIT, "I do not know.", WAIT, f"{WAIT}<|im_start|>", WAIT])
    trajectory = await episode(browsers, processor, answers, task("enter-text", max_steps=8), settings)
    assert trajectory.outcome == "success"
    assert [len(step.images) for step in trajectory.steps] == [1, 2, 3, 1, 1, 2, 3]  # full, then a special token
    whole = decode_trajectory(b"".join(encode_trajectory(trajectory)))
    chains = merge_prefixes(make_samples([Group(7, (whole,))], success_advantages), (processor.image_token_id,))
    assert sorted([len(chain.samples) for chain in chains]) == [1, 3, 3]
    assert sum(len(chain.images) for chain in chains) == 7
    assert "Step 4: no valid tool call -> format error: special_token" in answers.prompts[4]


async def test_prompts_share_screenshots_of_earlier_steps(browsers: BrowserClient, processor: Processor) -> None:
    settings = replace(SETTINGS, context=ContextConfig(history_turns=3, compact=True))
    answers = Answers(processor, [WAIT, WAIT])
    trajectory = await episode(browsers, processor, answers, task(), settings)
    assert [step.images.tolist() for step in trajectory.steps] == [[0], [0, 1], [0, 1, 2]]
    assert len(trajectory.images) == 4
