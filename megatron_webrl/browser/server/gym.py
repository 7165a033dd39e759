"""Tasks in real browsers as Gymnasium environments, on browser servers or on one that the environment starts.

import gymnasium
import megatron_webrl.browser.server.gym  # registers the environments
env = gymnasium.make("webrl/miniwob.click-test-v0", servers="http://node7:8700")
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, suppress
from dataclasses import asdict
from typing import Any, TypeVar

import gymnasium
import numpy as np
from anyio.from_thread import start_blocking_portal
from gymnasium import spaces
from PIL import Image

from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.page.observer import MAX_MARKS
from megatron_webrl.browser.server import protocol
from megatron_webrl.browser.server.client import BrowserClient
from megatron_webrl.browser.server.local_servers import POLL_SECONDS, LocalServers
from megatron_webrl.config.browser import BrowserConfig, check_browser_user
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.judge import evaluation as judge
from megatron_webrl.tasks import miniwob
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS
from megatron_webrl.tasks.source import TRAINING_SEEDS
from megatron_webrl.types import (
    ANSWER,
    COORDINATE_ACTION_KINDS,
    COORDINATE_RANGE,
    DONE,
    MARK_ACTION_KINDS,
    STEPS_EXHAUSTED,
    TRAINABLE_OUTCOMES,
    Action,
    Observation,
)

MAX_SAMPLE_CHARACTERS = 32  # of a sampled text
T = TypeVar("T")


class TextSpace(spaces.Text):
    """Any text. Gymnasium's own `Text` contains those of a fixed alphabet only, which page texts exceed."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(MAX_SAMPLE_CHARACTERS, min_length=0, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no numeric form."""
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class ActionSpace(TextSpace):
    """JSON of `types.Action`: the action kinds of one tool, each with its required fields."""

    def __init__(
        self, marks: bool, extra_actions: Sequence[str] = (), seed: int | np.random.Generator | None = None,
    ) -> None:  # fmt: skip
        """The settings browser.marks and browser.actions."""
        self.marks = marks
        self.kinds = (*(MARK_ACTION_KINDS if marks else COORDINATE_ACTION_KINDS), *extra_actions)
        super().__init__(seed)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random click. With marks, its element may not exist; the observation then has an error."""
        if self.marks:
            return json.dumps({"kind": "click", "element_id": int(self.np_random.integers(1, MAX_MARKS + 1))})
        coordinate = self.np_random.integers(COORDINATE_RANGE + 1, size=2).tolist()
        return json.dumps({"kind": "left_click", "coordinate": coordinate})

    def contains(self, x: Any) -> bool:
        """Whether `x` is the JSON of an action of these kinds; the server refuses one without a required field."""
        try:
            return bool(self.parse(x))
        except ValueError:
            return False

    def parse(self, text: Any) -> Action:
        """Parse an action. Raises ValueError that names the invalid field."""
        if not isinstance(text, str):
            raise ValueError(f"an action is the JSON of one, not a {type(text).__name__}")
        action = protocol.load(protocol.StepRequest, text.encode())
        if action.kind not in self.kinds:
            raise ValueError(f"kind: {action.kind} is not one of {', '.join(self.kinds)}")
        return action

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionSpace) and self.kinds == other.kinds

    def __repr__(self) -> str:
        return f"ActionSpace({', '.join(self.kinds)})"


def observation_space(spec: protocol.SessionSpec) -> spaces.Dict:
    """Space of `WebEnv` observations: screenshot uint8 [height, width, 3], texts, and elements and tabs if enabled."""
    pixels = spaces.Box(0, 255, (spec.height, spec.width, 3), np.uint8)
    fields: dict[str, spaces.Space[Any]] = {
        "screenshot": pixels, "instruction": TextSpace(), "url": TextSpace(), "title": TextSpace(),
        "error": TextSpace(), "page_changed": spaces.Discrete(2),
    }  # fmt: skip
    if spec.marks:
        box = spaces.Box(np.iinfo(np.int32).min, np.iinfo(np.int32).max, (4,), np.int32)
        fields["elements"] = spaces.Sequence(
            spaces.Dict(
                id=spaces.Discrete(MAX_MARKS, start=1), role=TextSpace(), name=TextSpace(), value=TextSpace(),
                box=box, states=spaces.Sequence(TextSpace()), options=spaces.Sequence(TextSpace()),
            )
        )  # fmt: skip
    if "switch_tab" in spec.actions:
        fields["tabs"] = spaces.Sequence(spaces.Dict(title=TextSpace(), url=TextSpace(), active=spaces.Discrete(2)))
    return spaces.Dict(fields)


class WebEnv(gymnasium.Env[dict[str, Any], str]):
    """One browser session. An action is the JSON of a `types.Action`, such as {"kind": "click", "element_id": 3}. The
    reward is the page's once it has ended the episode; for a task with an answer it is 1 or 0. The step limit truncates
    the episode with info["outcome"] "failure"; a browser failure truncates it with the name of the failure.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self, source: str = "miniwob", environment: str = "click-test", *, servers: str | None = None,
        token: str | None = None, max_steps: int = 10, step_seconds: float = 60.0, wait_seconds: float = 600.0,
        render_mode: str | None = None, **browser: Any,
    ) -> None:  # fmt: skip
        """`servers`: addresses as for `BrowserClient`, with their token; None starts a local browser server.
        `browser`: settings of `BrowserConfig` for the local server. Raises ConfigError, BrowserError, ProcessError.
        """
        if servers is not None and browser:
            name, value = next(iter(browser.items()))
            raise ConfigError(f"{name}={value} has no effect with servers={servers}: start them with browser.{name}")
        self.render_mode = render_mode
        self._request = protocol.ResetRequest(source=source, environment=environment)
        self._max_steps = max_steps
        self._steps = 0
        self._observation: Observation | None = None
        self._instruction = ""
        self._local: LocalServers | None = None
        self._exit_stack = ExitStack()
        # Operations have timeouts of their own; between them its event loop renews the lease.
        self._portal = self._exit_stack.enter_context(start_blocking_portal(name="webrl-gym"))
        try:
            addresses: str | Callable[[], list[str]] | None = servers
            if addresses is None:
                self._local = self._start_server(browser, step_seconds)
                self._wait_for_local_server()
                addresses, token = self._local.addresses, self._local.token
            browsers = self._entered(BrowserClient(
                addresses, token, step_seconds=step_seconds, wait_seconds=wait_seconds, owner=f"{source}/{environment}"
            ))  # fmt: skip
            self._session = self._entered(browsers.session())
            spec = self._portal.call(self._session.spec)
        except BaseException:
            self.close()
            raise
        self.observation_space = observation_space(spec)
        self.action_space = self._actions = ActionSpace(spec.marks, spec.actions)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Open the environment's page with a page seed drawn from `np_random`. Raises BrowserError."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(len(TRAINING_SEEDS)))
        request = protocol.ResetRequest(source=self._request.source, environment=self._request.environment, seed=drawn)
        self._observation = None
        self._wait_for_local_server()
        self._observation = self._portal.call(self._session.reset, request)
        self._instruction, self._steps = self._observation.instruction or "", 0
        return self._fields(self._observation), self._info()

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute an action. Raises ValueError for an invalid action, before reset and after the end."""
        if self._observation is None:
            raise ValueError("there is no episode; reset begins one")
        parsed = self._actions.parse(action)
        self._steps += 1
        try:
            self._observation = self._portal.call(self._session.step, parsed)
        except BrowserError as error:
            fields = self._fields(self._observation) | {"error": str(error)}
            self._observation = None
            return fields, 0.0, False, True, self._info() | {"outcome": error.outcome}
        observation, answer = self._observation, parsed.text if parsed.kind == "answer" else None
        ended = DONE if observation.done else ANSWER if answer is not None else STEPS_EXHAUSTED
        fields, info = self._fields(observation), self._info()
        if ended == STEPS_EXHAUSTED and self._steps < self._max_steps:
            return fields, 0.0, False, False, info
        assert self._session.task is not None
        reference = self._session.task.answer
        outcome = judge.outcome(observation.reward, ended, reference, answer)
        self._observation = None
        terminated = outcome in TRAINABLE_OUTCOMES and ended != STEPS_EXHAUSTED
        reward = float(outcome == "success") if reference is not None else float(observation.reward or 0.0)
        return fields, reward if terminated else 0.0, terminated, not terminated, info | {"outcome": outcome}

    def render(self) -> np.ndarray | None:
        """The screenshot, uint8 [height, width, 3], if render_mode is rgb_array."""
        if self.render_mode is None or self._observation is None:
            return None
        return _pixels(self._observation.screenshot)

    def close(self) -> None:
        """Release the session and end the local server, if there is one. A second call does nothing."""
        self._exit_stack.close()

    def _start_server(self, browser: dict[str, Any], step_seconds: float) -> LocalServers:
        config = Config(browser=BrowserConfig(**browser), rollout=RolloutConfig(operation_timeout_seconds=step_seconds))
        check_sections(config)
        check_browser_user(config.browser)
        server = LocalServers(config, sessions=1)
        self._exit_stack.callback(server.close)
        server.start()
        return server

    def _wait_for_local_server(self) -> None:
        """Restart the local server if it has ended. Raises ProcessError."""
        while self._local is not None and not self._local.poll_addresses():
            time.sleep(POLL_SECONDS)

    def _entered(self, context: AbstractAsyncContextManager[T]) -> T:
        """What a context of the event loop gives; it ends with the environment."""
        return self._exit_stack.enter_context(self._portal.wrap_async_context_manager(context))

    def _info(self) -> dict[str, Any]:
        task = self._session.task
        assert task is not None
        return {"task": task.id, "seed": task.seed, "steps": self._steps}

    def _fields(self, observation: Observation) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "screenshot": _pixels(observation.screenshot),
            "instruction": self._instruction or observation.instruction or "",
            "url": observation.url, "title": observation.title,
            "error": observation.error or "", "page_changed": int(observation.page_changed),
        }  # fmt: skip
        if observation.elements is not None:
            fields["elements"] = tuple(
                asdict(element) | {"box": np.array(element.box, np.int32)} for element in observation.elements
            )
        if "switch_tab" in self._actions.kinds:
            fields["tabs"] = tuple({"title": t.title, "url": t.url, "active": int(t.active)} for t in observation.tabs)
        return fields


def register() -> None:
    """Register every environment of the installed sources with Gymnasium, as webrl/<source>.<name>-v0."""
    environments_by_source = {"sites": list(ENVIRONMENTS)}
    with suppress(ConfigError):  # not installed; WebEnv can still open them on browser servers
        environments_by_source[miniwob.SOURCE_NAME] = miniwob.all_environments()
    for source, environments in environments_by_source.items():
        for environment in environments:
            chosen = {"source": source, "environment": environment}
            entry_point = "megatron_webrl.browser.server.gym:WebEnv"
            gymnasium.register(f"webrl/{source}.{environment}-v0", entry_point=entry_point, kwargs=chosen)


def _pixels(screenshot: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(screenshot)) as image:
        return np.array(image.convert("RGB"))


register()
