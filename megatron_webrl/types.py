"""The words of the project as data. Imported by every package; imports nothing of ours.

A task is run as an episode, whose data is a trajectory: a list of steps. The trajectories of one
ticket form a group and share a baseline. See docs/architecture.md for the glossary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    from playwright.async_api import Page

COORDINATE_RANGE = 1000
"""Actions address the viewport in integers 0..COORDINATE_RANGE on both axes, whatever its size in pixels."""

ActionKind = Literal[
    "left_click", "click", "type", "hover", "scroll", "wait", "go_back", "navigate", "answer",
    "double_click", "right_click", "drag", "key", "select_option", "new_tab", "switch_tab", "close_tab",
]  # fmt: skip
COORDINATE_ACTION_KINDS: tuple[ActionKind, ...] = (
    "left_click",
    "type",
    "scroll",
    "wait",
    "go_back",
    "navigate",
    "answer",
)
"""What the tool of coordinates, `computer_use`, always offers."""

MARK_ACTION_KINDS: tuple[ActionKind, ...] = (
    "click",
    "type",
    "hover",
    "scroll",
    "wait",
    "go_back",
    "navigate",
    "answer",
)
"""What the tool of numbered elements, `web_interaction`, always offers."""

TAB_ACTION_KINDS: tuple[ActionKind, ...] = ("new_tab", "switch_tab", "close_tab")
OPTIONAL_ACTION_KINDS: tuple[ActionKind, ...] = (
    "hover", "double_click", "right_click", "drag", "key", "select_option", *TAB_ACTION_KINDS,
)  # fmt: skip
"""What is offered by either tool where browser.actions names it."""

DIFFICULTIES = ("easy", "medium", "hard")

STOPPED, PREEMPTED = "stopped", "preempted"
CLEAN_JOB_OUTCOMES = ("finished", STOPPED, PREEMPTED)
"""How a job can end in good order: all updates made, or ended early with a checkpoint, as its user asked it to, or
because Slurm was about to end it.
"""

TRAINABLE_OUTCOMES = frozenset({"success", "failure"})
"""Outcomes that say something about the policy. Every other outcome masks the episode and names the reason."""

ABORTED = "aborted"
"""Masks an episode that was ended because its group could not be trained any more; the whole group is dropped."""


@dataclass(frozen=True)
class Task:
    """A goal on a site. For MiniWoB++ the page itself makes the instruction from the seed."""

    id: str
    source: str  # "miniwob", "sites", or "web" for any page
    environment: str  # page within the source, e.g. "click-test"
    seed: int
    max_steps: int
    instruction: str | None = None  # None: the page tells after reset
    difficulty: str = "easy"  # one of DIFFICULTIES
    answer: str | None = None  # what the `answer` action must say; None: only the page decides
    url: str | None = None  # where a task of the source "web" begins; others know it


@dataclass(frozen=True)
class Action:
    """One call of `computer_use` or `web_interaction`. Fields that the kind does not use are None."""

    kind: ActionKind
    coordinate: tuple[int, int] | None = None  # x, y in 0..COORDINATE_RANGE
    text: str | None = None  # also the chord of a key and the label of an option
    direction: Literal["up", "down"] | None = None
    time: float | None = None  # seconds
    url: str | None = None
    element_id: int | None = None  # number of an element of the observation that is answered
    end_coordinate: tuple[int, int] | None = None  # where a drag ends
    end_element_id: int | None = None  # the same by element
    tab: int | None = None  # place among the tabs, from 1


@dataclass(frozen=True)
class Element:
    """What can be acted on in view, by the number that the screenshot shows."""

    id: int
    role: str  # of the accessibility tree: "button", "textbox", ...
    name: str
    box: tuple[int, int, int, int]  # x, y, width, height of its visible part, pixels of the viewport
    value: str = ""
    states: tuple[str, ...] = ()  # such as "focused", "not checked"
    options: tuple[str, ...] = ()  # of a list, the first ones


@dataclass(frozen=True)
class OpenTab:
    """A tab as the agent is told of it; its place among the tabs is its number, from 1."""

    title: str
    url: str
    active: bool


@dataclass(frozen=True)
class Scroll:
    """Which part of the page is in view, CSS pixels."""

    x: int
    y: int
    page_height: int


@dataclass(frozen=True)
class StepSeconds:
    """Where a browser's time for one observation went, wall clock."""

    acting: float
    settling: float
    capturing: float


@dataclass(frozen=True)
class Observation:
    """What the agent sees after a reset or a step."""

    screenshot: bytes  # encoded image: PNG, JPEG or WebP
    url: str
    title: str
    page_changed: bool  # pixels differ from the previous observation; numbers drawn on the elements do not count
    instruction: str | None = None
    error: str | None = None  # what could not be done or the page did uninvited; the episode goes on
    reward: float | None = None  # from the page, once done
    done: bool = False
    elements: tuple[Element, ...] | None = None  # None: the screenshot has no numbers
    tabs: tuple[OpenTab, ...] = ()  # where tabs are enabled
    scroll: Scroll | None = None
    seconds: StepSeconds | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Step:
    """One observation -> response -> action, with exactly the tokens that the engine saw and produced."""

    prompt_token_ids: np.ndarray  # int32 [prompt], image placeholders expanded
    response_token_ids: np.ndarray  # int32 [response]
    logprobs: np.ndarray  # float32 [response], behaviour policy, at the sampling temperature
    versions: np.ndarray  # int32 [response], policy version that produced each token
    images: np.ndarray  # int32 [images], indices into Trajectory.images, in prompt order
    image_grids: np.ndarray  # int32 [images, 3], patches (t, h, w) as the engine used them
    finish_reason: str  # "stop" or "length"
    action: Action | None  # None: the response had no valid action
    format_error: str | None = None
    page_changed: bool = False
    seconds_generation: float = 0.0
    seconds_browser: float = 0.0
    cached_prompt_tokens: int = 0  # tokens of the prompt that the engine took from its prefix cache when it began


@dataclass(frozen=True)
class Trajectory:
    """One episode. `outcome` is "success", "failure", or the name of what masks the episode."""

    ticket: int
    index: int  # 0..group_size-1 within the group
    group_size: int
    restart_epoch: int
    task: Task
    instruction: str
    steps: tuple[Step, ...]
    images: tuple[bytes, ...]  # encoded screenshots, each once
    reward: float  # 1.0 success, 0.0 otherwise
    outcome: str
    temperature: float
    seconds: float  # wall clock of the episode
    finished_at: float = 0.0  # unix time, seconds
    worker: str = ""  # which life of which rollout worker ran it
    tries: int = 1  # at this episode; those before the last were broken off by the machinery
    discarded_tokens: int = 0  # response tokens of the earlier tries

    @property
    def trainable(self) -> bool:
        """Whether the episode counts in its group's statistics and in the loss."""
        return self.outcome in TRAINABLE_OUTCOMES and any(len(s.response_token_ids) for s in self.steps)

    @property
    def response_tokens(self) -> int:
        """Of all steps."""
        return sum(len(step.response_token_ids) for step in self.steps)

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version among all response tokens; None without tokens."""
        return min((int(s.versions.min()) for s in self.steps if len(s.versions)), default=None)


@dataclass(frozen=True)
class Group:
    """The episodes of one ticket."""

    ticket: int
    trajectories: tuple[Trajectory, ...]


class TaskSite(Protocol):
    """What a browser session needs from a task source: open the page of a task, read its result."""

    @property
    def origins(self) -> frozenset[str]:
        """Origins that pages may reach, such as http://shop.localhost."""
        ...

    @property
    def addresses(self) -> Mapping[str, str]:
        """Server of each host name, such as {"shop.localhost": "127.0.0.1:8000"}; other names are looked up in DNS.

        URLs stay the same from run to run although local servers take any free port.
        """
        ...

    def can_reuse_page(self, task: Task) -> bool:
        """Whether `open` accepts the page of a finished episode of this task, in the same browser context."""
        ...

    async def open(self, page: Page, task: Task) -> str:
        """Load the start page of the task; returns the instruction."""
        ...

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward (None until there is one) and whether the task is over."""
        ...
