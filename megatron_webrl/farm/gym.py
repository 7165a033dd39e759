"""Tasks in real browsers as Gymnasium environments, on a farm or on a node of the environment's own.

import gymnasium
import megatron_webrl.farm.gym  # registers them

env = gymnasium.make("webrl/miniwob.click-test-v0", farm_url="http://router:8700")
"""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any, TypeVar

import gymnasium
import numpy as np
from PIL import Image

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.browser_checks import check_browser_server_config
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.farm import protocol
from megatron_webrl.farm.client import BrowserClient, RemoteSession
from megatron_webrl.farm.local_servers import POLL_SECONDS, LocalServers
from megatron_webrl.farm.spaces import ActionSpace, observation_space
from megatron_webrl.judge import outcome as judge
from megatron_webrl.tasks import miniwob, miniwob_page
from megatron_webrl.tasks.sites.catalog import ENVIRONMENTS
from megatron_webrl.tasks.source import TRAINING_SEEDS
from megatron_webrl.types import TRAINABLE_OUTCOMES, Observation

SERVER_POLL_SECONDS = 0.25
RESET_ATTEMPTS = 2
T = TypeVar("T")


class WebEnv(gymnasium.Env[dict[str, Any], str]):
    """One browser session. An action is the JSON of a `types.Action`, such as {"kind": "click", "element_id": 3}.

    Observations are described by `observation_space`. The reward is the page's, once it has ended the episode; for a
    task with an answer 1 or 0. What says nothing about the agent truncates the episode: the last step, with
    info["outcome"] "failure", and a browser that failed, with the name of what has happened.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self, source: str = "miniwob", environment: str = "click-test", *, farm_url: str | None = None,
        token: str | None = None, max_steps: int = 10, step_seconds: float = 60.0, wait_seconds: float = 600.0,
        render_mode: str | None = None, **browser: Any,
    ) -> None:  # fmt: skip
        """`farm_url`: addresses as of `Browsers`, with their token; None starts a node of this process' own.

        `browser`: settings of `config.BrowserConfig`, such as marks=True. Of a farm they are the node's: those that are
        given must agree. Raises ConfigError, BrowserError, ProcessError.
        """
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode={render_mode!r} is not rgb_array")
        self.render_mode = render_mode
        self._asked = protocol.ResetRequest(source=source, environment=environment)
        self._max_steps = max_steps
        self._steps = 0
        self._seen: Observation | None = None
        self._instruction = ""
        self._nodes: LocalServers | None = None
        self._closing = ExitStack()
        self._loop = _Loop()
        self._closing.callback(self._loop.close)
        try:
            addresses = farm_url if farm_url is not None else self._own_node(browser, step_seconds)
            if self._nodes is not None:
                token = self._nodes.token
            self._session = self._run(self._enter(BrowserClient(
                addresses, token, step_seconds=step_seconds, wait_seconds=wait_seconds, owner=f"{source}/{environment}"
            )))  # fmt: skip
            view = self._run(self._session.spec())
            if farm_url is not None:
                _check_agrees(view, browser, self._session.lease.server)
        except BaseException:
            self.close()
            raise
        self.observation_space = observation_space(view)
        self.action_space = self._actions = ActionSpace(view.marks, view.actions, view.max_marks, view.tabs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Open the environment's page with a seed drawn from the environment's generator. Raises BrowserError."""
        super().reset(seed=seed)
        page_seed = int(self.np_random.integers(len(TRAINING_SEEDS)))
        asked = protocol.ResetRequest(source=self._asked.source, environment=self._asked.environment, seed=page_seed)
        self._seen = None
        for attempt in range(RESET_ATTEMPTS):
            try:
                self._seen = self._run(self._session.reset(asked))
                break
            except BrowserError:
                if attempt + 1 == RESET_ATTEMPTS:
                    raise
        assert self._seen is not None
        self._instruction, self._steps = self._seen.instruction or "", 0
        return self._shown(self._seen), self._info()

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Carry out an action. Raises ValueError for what is no action, or comes before reset or after the end."""
        if self._seen is None:
            raise ValueError("there is no episode; reset begins one")
        parsed = self._actions.parse(action)
        self._steps += 1
        try:
            self._seen = self._run(self._session.step(parsed))
        except BrowserError as error:
            shown = self._shown(self._seen) | {"error": str(error)}
            self._seen = None
            return shown, 0.0, False, True, self._info() | {"outcome": error.outcome}
        seen, answer = self._seen, parsed.text if parsed.kind == "answer" else None
        ended = judge.DONE if seen.done else judge.ANSWER if answer is not None else judge.STEPS_EXHAUSTED
        shown, info = self._shown(seen), self._info()
        if ended == judge.STEPS_EXHAUSTED and self._steps < self._max_steps:
            return shown, 0.0, False, False, info
        reference = self._session.task.answer if self._session.task is not None else None
        outcome = judge.outcome(seen.reward, ended, reference, answer)
        self._seen = None
        terminated = outcome in TRAINABLE_OUTCOMES and ended != judge.STEPS_EXHAUSTED
        reward = float(outcome == "success") if reference is not None else float(seen.reward or 0.0)
        return shown, reward if terminated else 0.0, terminated, not terminated, info | {"outcome": outcome}

    def render(self) -> np.ndarray | None:
        """The screenshot, uint8 [height, width, 3], with render_mode rgb_array."""
        if self.render_mode is None or self._seen is None:
            return None
        return _pixels(self._seen.screenshot)

    def close(self) -> None:
        """Give the session back; end the node if it is the environment's own. A second call does nothing."""
        self._closing.close()

    def _own_node(self, browser: dict[str, Any], step_seconds: float) -> Callable[[], list[str]]:
        config = Config(browser=BrowserConfig(**browser), rollout=RolloutConfig(operation_timeout_seconds=step_seconds))
        check_browser_server_config(config)
        nodes = LocalServers(config, sessions=1)
        self._closing.callback(nodes.close)
        nodes.start()
        while not nodes.poll_addresses():
            time.sleep(POLL_SECONDS)
        self._nodes = nodes
        return nodes.addresses

    async def _enter(self, browsers: BrowserClient) -> RemoteSession:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(browsers)
            session = await stack.enter_async_context(browsers.session())
            opened = stack.pop_all()
            self._closing.callback(lambda: self._loop.run(opened.aclose(), lambda: None))
        return session

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, done by the event loop. Own nodes are started by this thread alone."""
        return self._loop.run(work, self._nodes.poll if self._nodes is not None else lambda: None)

    def _info(self) -> dict[str, Any]:
        task = self._session.task
        assert task is not None
        return {"task": task.id, "seed": task.seed, "steps": self._steps}

    def _shown(self, seen: Observation) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "screenshot": _pixels(seen.screenshot), "instruction": self._instruction or seen.instruction or "",
            "url": seen.url, "title": seen.title, "error": seen.error or "", "page_changed": int(seen.page_changed),
        }  # fmt: skip
        if seen.elements is not None:
            shown["elements"] = tuple(
                {
                    "id": one.id, "role": one.role, "name": one.name, "value": one.value,
                    "box": np.array(one.box, np.int32), "states": one.states, "options": one.options,
                }
                for one in seen.elements
            )  # fmt: skip
        if "switch_tab" in self._actions.kinds:
            shown["tabs"] = tuple({"title": t.title, "url": t.url, "active": int(t.active)} for t in seen.tabs)
        return shown


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="webrl-gym", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], meanwhile: Callable[[], object]) -> T:
        """The result of `work`, whose limits are its own; `meanwhile` is called now and then by this thread."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                try:
                    return future.result(SERVER_POLL_SECONDS)
                except TimeoutError:
                    if future.done():
                        raise
                    meanwhile()
        finally:
            future.cancel()

    def close(self) -> None:
        """Stop the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def register() -> None:
    """Make every environment of the sources installed here known to Gymnasium, as webrl/<source>.<name>-v0."""
    known = {"sites": list(ENVIRONMENTS)}
    with suppress(ConfigError):  # where the package is not installed; of a farm all can be had by WebEnv
        known[miniwob.SOURCE_NAME] = miniwob_page.all_environments()
    for source, environments in known.items():
        for environment in environments:
            name = f"webrl/{source}.{environment}-v0"
            if name not in gymnasium.registry:
                chosen = {"source": source, "environment": environment}
                gymnasium.register(name, entry_point="megatron_webrl.farm.gym:WebEnv", kwargs=chosen)


def _check_agrees(view: protocol.SessionSpec, browser: dict[str, Any], node: str) -> None:
    for name, value in browser.items():
        if not hasattr(view, name):
            raise ConfigError(f"browser.{name} is a setting of the node {node}; leave it out, or start a node with it")
        found = getattr(view, name)
        if (tuple(value) if isinstance(found, tuple) else value) != found:
            raise ConfigError(f"the node {node} has browser.{name}={found}, not {value}; start one with it")


def _pixels(screenshot: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(screenshot)) as image:
        return np.array(image.convert("RGB"))


register()
