"""Episodes of programs that act in a browser of their own, with scripted responses in place of the policy's."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from megatron_webrl.browser.server.client import BrowserClient, RemoteSession
from megatron_webrl.browser.server.local_servers import local_servers
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.rollout import AgentConfig, HarnessConfig, RolloutConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.evaluation import page_verdict, with_verdict
from megatron_webrl.judge.questions import EpisodeView
from megatron_webrl.model.patchifier import decode_image
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory, encode_trajectory
from megatron_webrl.rollout.agent import Episode
from megatron_webrl.rollout.demonstrations import scripted_generation
from megatron_webrl.rollout.episode_runner import agent_class
from megatron_webrl.rollout.generator import NO_LIMITS, Generation, GenerationError, ResponseLimits
from megatron_webrl.rollout.harness import MAX_REQUEST_BYTES
from megatron_webrl.track.live_rollouts import LiveRollout
from megatron_webrl.trainer.data.batching import make_samples, success_advantages
from megatron_webrl.trainer.data.prefix_merging import merge_prefixes
from megatron_webrl.types import Group, Task, Trajectory
from tests.browser.server.servers import config_for
from tests.documented_blocks import blocks_run_by

pytestmark = pytest.mark.asyncio(loop_scope="module")

SETTINGS = RolloutConfig(max_model_len=2048, max_new_tokens=64, operation_timeout_seconds=20)
TASK = Task("miniwob/click-test/1", "miniwob", "click-test", seed=1, max_steps=4)
PREAMBLE = """
import base64, json, os, sys, threading, time, urllib.request

task = json.loads(os.environ["WEBRL_TASK"])

def post(url, body, key=os.environ["OPENAI_API_KEY"]):
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30).read()

def call(messages, model="policy", **options):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"model": model, "messages": messages, **options}
    answer = json.loads(post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body))
    return answer["choices"][0]["message"]

def result(**values):
    post(os.environ["WEBRL_RESULT_URL"], values)

def page():
    from playwright.sync_api import sync_playwright
    browser = sync_playwright().start().chromium.connect_over_cdp(os.environ["WEBRL_CDP_URL"])
    return browser.contexts[0].pages[0]

def picture(page):
    data = base64.b64encode(page.screenshot()).decode()
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + data}}
"""


@dataclass
class Policy:
    """Gives fixed responses in turn, then the last one. Raises an exception among them."""

    processor: Processor
    answers: list[str | Exception]
    seconds: float = 0.0
    prompts: list[str] = field(default_factory=list)
    limits: list[ResponseLimits] = field(default_factory=list)

    async def generate(
        self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes],
        limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        self.prompts.append(self.processor.tokenizer.decode(token_ids))
        self.limits.append(limits)
        await asyncio.sleep(self.seconds)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return scripted_generation(self.processor, token_ids, images, answer)


@dataclass(frozen=True)
class Player:
    """Runs a program as the harness of an episode, and judges the episode by its page."""

    browsers: BrowserClient
    processor: Processor
    folder: Path

    async def play(
        self, code: str, *answers: str | Exception, policy: Policy | None = None, task: Task = TASK,
        seconds: float = 60.0, **settings: Any,
    ) -> Trajectory:  # fmt: skip
        program = self.folder / "harness.py"
        program.write_text(PREAMBLE + code)
        harness = HarnessConfig("harness", [sys.executable, str(program)], **settings)
        agent = agent_class(harness)(self.browsers, self.processor)
        episode = Episode(replace(SETTINGS, episode_timeout_seconds=seconds), LiveRollout(task, 7, 1, 4))
        trajectory = await agent.run(policy or Policy(self.processor, list(answers) or ["hello"]), episode)
        assert not [each for each in psutil.process_iter() if str(program) in " ".join(cmdline(each))]
        trajectory = with_verdict(trajectory, page_verdict(trajectory))
        return decode_trajectory(b"".join(encode_trajectory(trajectory)))


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def player(processor: Processor, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Player]:
    config = config_for(cdp=True)
    async with (
        local_servers(config, 3) as servers,
        BrowserClient(servers.poll_addresses, servers.token, step_seconds=20) as browsers,
    ):
        yield Player(browsers, processor, tmp_path_factory.mktemp("harness"))


async def test_a_program_solves_a_task_in_its_browser(player: Player) -> None:
    code = """
seen = page()
shown = [{"type": "text", "text": task["instruction"]}, picture(seen)]
history = [{"role": "system", "content": "Say what to click."}, {"role": "user", "content": shown}]
while True:
    history.append(call(history, temperature=0, seed=1))
    if history[-1]["content"] == "click":
        seen.click("text=Click Me!")
    history.append({"role": "user", "content": [{"type": "text", "text": "And now?"}, picture(seen)]})
"""
    policy = Policy(player.processor, ["I see a button.", "click"])
    trajectory = await player.play(code, policy=policy)
    assert (trajectory.outcome, trajectory.end_reason, trajectory.reward) == ("success", "done", 1.0)
    assert trajectory.instruction == "Click the button."
    assert [player.processor.decode(step.response_token_ids) for step in trajectory.steps] == [
        "I see a button.",
        "click",
    ]
    assert [step.page_changed for step in trajectory.steps] == [False, True]
    assert [step.title for step in trajectory.steps] == ["Click Test Task"] * 2
    first, second = policy.prompts
    assert second.startswith(first + "I see a button.<|im_end|>\n<|im_start|>user\nAnd now?")
    for step, count in zip(trajectory.steps, (1, 2), strict=True):
        grids = player.processor.grids([trajectory.images[index] for index in step.images])
        assert step.image_grids.tolist() == grids.tolist()
        assert len(step.images) == count
    # The second call continues the first: both are trained as one sequence.
    samples = make_samples([Group(7, (trajectory,))], success_advantages)
    assert len(merge_prefixes(samples, player.processor.placeholder_token_ids)) == 1
    # The judge sees the browser's own screenshots, not the pictures that the program sends.
    view = EpisodeView.of(trajectory)
    shown = [shot.image for shot in view.screenshots]
    assert trajectory.browser_images is not None
    assert shown == list(dict.fromkeys(bytes(trajectory.images[index]) for index in trajectory.browser_images))
    assert view.actions == "1. asked the model; page unchanged\n2. asked the model; page changed"


@pytest.mark.parametrize(
    ("code", "outcome", "end"),
    [
        ('call("a"); result(answer=" 12.50 ")', "success", "answer"),
        ('call("a"); result(answer="13")', "failure", "answer"),
        ('call("a"); result()', "failure", "steps_exhausted"),
        ('call("a")', "failure", "steps_exhausted"),  # it exits
    ],
)
async def test_an_answer_is_compared_with_the_tasks(player: Player, code: str, outcome: str, end: str) -> None:
    trajectory = await player.play(code, task=replace(TASK, answer="12.5"))
    assert (trajectory.outcome, trajectory.end_reason) == (outcome, end)
    assert trajectory.answer == ((" 12.50 " if outcome == "success" else "13") if end == "answer" else None)


async def test_a_reward_of_the_program_counts_where_the_page_has_none(player: Player) -> None:
    assert (await player.play('call("a"); result(reward=1)')).outcome == "success"
    assert (await player.play('call("a"); result(reward=0)')).outcome == "failure"
    clicked = await player.play('page().click("text=Click Me!"); result(reward=0)')
    assert (clicked.outcome, clicked.page_reward) == ("success", 1.0)


async def test_the_task_has_no_answer_and_the_environment_no_secret(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    code = 'result(answer=json.dumps({"task": task, "names": sorted(os.environ), "home": os.environ["HOME"]}))'
    policy = Policy(player.processor, ["x"])
    trajectory = await player.play('call("a")\n' + code, policy=policy, task=replace(TASK, answer="12.5"))
    told = json.loads(str(trajectory.answer))
    assert told["task"] == {
        "id": TASK.id, "source": "miniwob", "environment": "click-test", "instruction": "Click the button.",
        "max_steps": 4, "url": "http://miniwob.localhost/miniwob/click-test.html",
    }  # fmt: skip
    assert not {"WANDB_API_KEY", "WEBRL_BROWSERS_TOKEN"} & set(told["names"])
    assert not Path(told["home"]).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")
async def test_a_program_reaches_nothing_but_its_browser_and_the_policy(player: Player) -> None:
    outside = socket.create_server(("127.0.0.1", 0))
    code = f"""
import socket
call("a")
try:
    socket.create_connection(("127.0.0.1", {outside.getsockname()[1]}), 2)
    result(reward=0)
except OSError:
    result(reward=1)
"""
    with outside:
        assert (await player.play(code)).outcome == "success"


@pytest.mark.parametrize("user", ["", "nobody"])
async def test_every_tab_is_under_the_egress_policy(processor: Processor, tmp_path: Path, user: str) -> None:
    """Also those of a browser that is in a network of its own."""
    if user and os.geteuid() != 0:
        pytest.skip("another user needs root")
    code = """
call("a")
tab = page().context.new_page()
try:
    tab.goto("http://example.com/")
except Exception:
    pass  # it shows what refused it
result(answer=tab.inner_text("body"))
"""
    async with (
        local_servers(config_for(cdp=True, user=user), 1) as servers,
        BrowserClient(servers.poll_addresses, servers.token, step_seconds=20) as browsers,
    ):
        trajectory = await Player(browsers, processor, tmp_path).play(code)
    assert "example.com:80 is not one of the allowed places" in str(trajectory.answer)


async def test_an_episode_ends_after_its_calls(player: Player) -> None:
    trajectory = await player.play('while True: call("a")', max_calls=3)
    assert (trajectory.outcome, trajectory.end_reason, len(trajectory.steps)) == ("failure", "steps_exhausted", 3)
    assert len((await player.play('while True: call("a")')).steps) == TASK.max_steps


@pytest.mark.parametrize(
    ("code", "outcome", "steps"),
    [
        ('call("a"); os.kill(os.getpid(), 9)', "harness_failed", 1),
        ('call("a"); raise KeyError("no such key")', "harness_failed", 1),
        ('call("a", model="gpt-9")', "harness_refused", 0),
        (f'call("a" * {MAX_REQUEST_BYTES})', "harness_refused", 0),
        ('seen = page(); call([{"role": "user", "content": [picture(seen)] * 5}])', "harness_refused", 0),
        ('post(os.environ["WEBRL_RESULT_URL"], {"answer": 12})', "harness_refused", 0),
        ('post(os.environ["WEBRL_RESULT_URL"], {}, key="guess")', "harness_refused", 0),
        ('call("a " * 3000)', "context_overflow", 0),
        ('call("a"); page().context.browser.new_browser_cdp_session().send("Browser.close"); call("b")',
         "browser_crashed", 1),
        ("while True: time.sleep(1)", "episode_timeout", 0),
    ],
)  # fmt: skip
async def test_a_fault_masks_the_episode_by_name(player: Player, code: str, outcome: str, steps: int) -> None:
    seconds = 6.0 if outcome == "episode_timeout" else 60.0
    trajectory = await player.play(code, seconds=seconds)
    assert (trajectory.outcome, len(trajectory.steps), trajectory.trainable) == (outcome, steps, False)


async def test_a_flood_of_calls_masks_the_episode(player: Player) -> None:
    code = """
for number in range(1000):
    threading.Thread(target=call, args=("a",), daemon=True).start()
time.sleep(60)
"""
    trajectory = await player.play(code, policy=Policy(player.processor, ["x"], seconds=2.0), max_calls=1000)
    assert trajectory.outcome == "harness_flooded"


async def test_a_call_that_is_left_masks_the_episode(player: Player) -> None:
    code = """
import socket
from urllib.parse import urlsplit
address = urlsplit(os.environ["OPENAI_BASE_URL"])
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a"}], "stream": True}).encode()
cut = socket.create_connection((address.hostname, address.port))
head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: a\\r\\nContent-Length: {len(body)}\\r\\nAuthorization: Bearer "
cut.sendall(head.encode() + os.environ["OPENAI_API_KEY"].encode() + b"\\r\\n\\r\\n" + body)
time.sleep(0.5)
cut.close()
time.sleep(60)
"""
    trajectory = await player.play(code, policy=Policy(player.processor, ["x"], seconds=5.0))
    assert (trajectory.outcome, len(trajectory.steps)) == ("harness_failed", 0)


async def test_parallel_calls_are_steps_with_prompts_of_their_own(player: Player) -> None:
    code = """
threads = [threading.Thread(target=call, args=(f"agent {number}",)) for number in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
result(reward=1)
"""
    policy = Policy(player.processor, ["x"], seconds=0.5)
    trajectory = await player.play(code, policy=policy)
    assert (trajectory.outcome, len(trajectory.steps)) == ("success", 3)
    assert sorted(prompt.split("agent ")[1][0] for prompt in policy.prompts) == ["0", "1", "2"]


async def test_an_engine_error_masks_the_episode(player: Player) -> None:
    trajectory = await player.play('call("a")', GenerationError("no output"))
    assert trajectory.outcome == "engine_error"


async def test_a_failed_program_costs_no_other_episode(player: Player) -> None:
    good = 'call("a"); time.sleep(2); result(reward=1)'
    folder = player.folder / "other"
    folder.mkdir()
    other = replace(player, folder=folder)
    played = await asyncio.gather(player.play(good), other.play('call("a"); os.kill(os.getpid(), 9)'))
    assert [trajectory.outcome for trajectory in played] == ["success", "harness_failed"]


async def test_a_stream_has_the_whole_message(player: Player) -> None:
    code = """
body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], "stream": True}
body["stream_options"] = {"include_usage": True}
text = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body).decode()
events = [line[6:] for line in text.split("\\n") if line.startswith("data: ")]
assert events[-1] == "[DONE]", events
chunks = [json.loads(event) for event in events[:-1]]
assert chunks[0]["choices"][0]["delta"]["content"] == "hello", chunks
assert chunks[1]["choices"][0]["finish_reason"] == "stop", chunks
assert chunks[2]["usage"]["completion_tokens"] > 0, chunks
result(reward=1)
"""
    assert (await player.play(code, "hello")).outcome == "success"


async def test_limits_of_a_call_reach_the_engine(player: Player) -> None:
    policy = Policy(player.processor, ["thought Observation: made up"])
    code = """
answer = call("a", max_tokens=7, stop=["Observation:"])["content"]
assert answer == "thought", answer
result(reward=1)
"""
    assert (await player.play(code, policy=policy)).outcome == "success"
    assert policy.limits == [ResponseLimits(7, ("Observation:",))]


async def test_the_documented_function_is_a_harness(
    player: Player, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (code,) = blocks_run_by(__file__, "docs/harness.md", "python")
    (tmp_path / "my_harness.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    agent = agent_class(HarnessConfig("harness", ["my_harness:run"]))(player.browsers, player.processor)
    for answers, ended in ((["Click the button.", "Click Me!"], "done"), (["answer: 42"], "answer")):
        task = replace(TASK, answer="42" if ended == "answer" else None)
        episode = Episode(SETTINGS, LiveRollout(task, 7, 1, 4))
        trajectory = await agent.run(Policy(player.processor, answers), episode)
        assert trajectory.end_reason == ended
        assert with_verdict(trajectory, page_verdict(trajectory)).outcome == "success"
    with pytest.raises(ConfigError, match=r"rollout\.agent\.command=my_harness:walk: my_harness has no walk"):
        agent_class(HarnessConfig("harness", ["my_harness:walk"]))


async def test_the_harness_of_the_signs_asks_what_the_built_in_agent_asks(processor: Processor) -> None:
    quickstart = parse_config("configs/quickstart.yaml", ["browser.cdp=true", "browser.reuse_pages=0"])
    click = (
        'Memory: blue square;\n<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", '
        '"coordinate": [%d, %d]}}\n</tool_call>'
    )
    answers = [click % (500, 840), "Memory: none", "nothing", click % (5, 5), click % (500, 840)]
    task = Task("miniwob/remember-sign-4-1/1", "miniwob", "remember-sign-4-1", seed=1, max_steps=5)
    found = []
    async with (
        local_servers(quickstart, 1) as servers,
        BrowserClient(servers.poll_addresses, servers.token, step_seconds=20) as browsers,
    ):
        for settings in (AgentConfig(), HarnessConfig("harness", ["tools.bench.sign_harness:run"])):
            policy = Policy(processor, list(answers))
            episode = Episode(quickstart.rollout, LiveRollout(task, 7, 1, 4))
            trajectory = await agent_class(settings)(browsers, processor).run(policy, episode)
            images = [decode_image(trajectory.images[index]) for step in trajectory.steps for index in step.images]
            found.append((trajectory.end_reason, policy.prompts, [image.tobytes() for image in images]))
    assert len(found[0][1]) == len(answers)
    assert found[0] == found[1]
