"""Data types shared by all packages. Imports no other module of the package.

A task is run as an episode, whose data is a trajectory: a list of steps. The trajectories of one ticket form a group
and share a baseline. Glossary: docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, Self

if TYPE_CHECKING:
    import numpy as np
    from playwright.async_api import Page

COORDINATE_RANGE = 1000  # actions' coordinates are integers 0..1000 on both axes of the viewport, whatever its pixels

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
"""Actions that the tool of coordinates, `computer_use`, always offers."""

MARK_ACTION_KINDS: tuple[ActionKind, ...] = "click", "type", "hover", "scroll", "wait", "go_back", "navigate", "answer"
"""Actions that the tool of numbered elements, `web_interaction`, always offers."""

TAB_ACTION_KINDS: tuple[ActionKind, ...] = ("new_tab", "switch_tab", "close_tab")
OPTIONAL_ACTION_KINDS: tuple[ActionKind, ...] = (
    "hover", "double_click", "right_click", "drag", "key", "select_option", *TAB_ACTION_KINDS,
)  # fmt: skip
"""Actions that either tool offers if browser.actions names them."""

DIFFICULTIES = ("easy", "medium", "hard")
STOPPED, PREEMPTED, BUDGET_SPENT = "stopped", "preempted", "judge_budget_spent"
CLEAN_JOB_OUTCOMES = ("finished", STOPPED, PREEMPTED, BUDGET_SPENT)
"""Outcomes of a job without a failure: all updates made, or ended early with a checkpoint: by its user, by Slurm, or
because the judge's budget was spent."""
_INFRASTRUCTURE_FAILURE = "failed: infrastructure: "


def failed_outcome(reason: str, infrastructure: bool = False) -> str:
    """The outcome of a job that failed; `infrastructure`: another launch, perhaps on other nodes, may succeed."""
    return f"{_INFRASTRUCTURE_FAILURE if infrastructure else 'failed: '}{reason}"


def is_infrastructure_failure(outcome: str) -> bool:
    return outcome.startswith(_INFRASTRUCTURE_FAILURE)


# How episodes end, if nothing masks them.
DONE, ANSWER = "done", "answer"  # ends by the page, by the agent
STEPS_EXHAUSTED, GO_BACKS = "steps_exhausted", "go_backs"  # by the last step, by going back from the start page
REGULAR_ENDS = (DONE, ANSWER, STEPS_EXHAUSTED, GO_BACKS)

TRAINABLE_OUTCOMES = frozenset({"success", "failure"})
"""Outcomes that measure the policy. Every other outcome masks the episode and names the reason."""

FAULT_OUTCOMES = frozenset(
    {"browser_error", "browser_crashed", "browser_timeout", "page_crashed", "lease_lost", "engine_error"}
)
"""Outcomes of episodes that a fault of the infrastructure masks; the others depend on the page or the policy."""

EPISODE_TIMEOUT = "episode_timeout"  # masks an episode that did not end within rollout.episode_timeout_seconds
LIMIT_OUTCOMES = frozenset({EPISODE_TIMEOUT, "context_overflow"})
"""Outcomes of episodes that the time limit or the length of the context cut off."""

BLOCKED = "blocked"  # masks an episode in which the website refused the agent, such as by a CAPTCHA
REWARD_ERROR = "reward_error"  # masks an episode to which trainer.reward.function gives no reward
JUDGE_ERROR = "judge_error"  # masks an episode without a usable verdict
TEACHER_ERROR = "teacher_error"  # masks an episode that the teacher of a distillation could not score
ABORTED = "aborted"  # masks an episode ended because its group can no longer be trained; the whole group is dropped


@dataclass(frozen=True)
class RubricFact:
    """One fact that an answer must establish. Facts of a group share its id and description."""

    group: str
    description: str
    fact: str


@dataclass(frozen=True)
class Task:
    """A goal on a site. MiniWoB++ pages generate the instruction from the seed."""

    id: str
    source: str  # "miniwob", "sites", or "web" for any page
    environment: str  # page within the source, e.g. "click-test"
    seed: int
    max_steps: int
    instruction: str | None = None  # None: read from the page after reset
    difficulty: str = "easy"  # one of DIFFICULTIES
    answer: str | None = None  # required text of the `answer` action; None: only the page decides
    url: str | None = None  # start page of a task of the source "web"; other sources know theirs
    website: str = ""  # host of the start page, lower case; the unit of block list and of website sampling
    benchmark: str = ""
    domain: str = ""
    subdomain: str = ""
    fact_count: int = 0  # difficulty as task files give it: the number of facts; 0: not given
    facts: tuple[RubricFact, ...] = ()  # of the rubric judge
    part: str = ""  # name of the source in tasks.mix; empty where a run has one source


class TaskReference(NamedTuple):
    """What a ticket says of its task: the source makes the same task of environment and seed on every machine."""

    id: str
    environment: str
    seed: int
    max_steps: int
    part: str = ""

    @classmethod
    def of(cls, task: Task) -> Self:
        return cls(task.id, task.environment, task.seed, task.max_steps, task.part)


@dataclass(frozen=True)
class Action:
    """One call of `computer_use` or `web_interaction`. Fields that the kind does not use are None."""

    kind: ActionKind
    coordinate: tuple[int, int] | None = None  # x, y in 0..COORDINATE_RANGE
    text: str | None = None  # also the chord of a key and the label of an option
    direction: Literal["up", "down"] | None = None
    time: float | None = None  # seconds
    url: str | None = None
    element_id: int | None = None  # number of an element of the current observation
    end_coordinate: tuple[int, int] | None = None  # end of a drag
    end_element_id: int | None = None  # end of a drag, by element
    tab: int | None = None  # from 1
    note: str | None = None  # what a scripted policy writes into Memory with it; no part of the call


@dataclass(frozen=True)
class Element:
    """An interactive element in view, with the number that the screenshot shows."""

    id: int
    role: str  # of the accessibility tree: "button", "textbox", ...
    name: str
    box: tuple[int, int, int, int]  # x, y, width, height of its visible part, pixels of the viewport
    value: str = ""
    states: tuple[str, ...] = ()  # such as "focused", "not checked"
    options: tuple[str, ...] = ()  # the first options of a list


@dataclass(frozen=True)
class OpenTab:
    """A tab as the agent sees it; its number is its position among the tabs, from 1."""

    title: str
    url: str
    active: bool


@dataclass(frozen=True)
class Scroll:
    """The part of the page in view, CSS pixels."""

    x: int
    y: int
    page_height: int


@dataclass(frozen=True)
class StepSeconds:
    """Wall-clock durations of one observation in the browser."""

    acting: float
    settling: float
    capturing: float


@dataclass(frozen=True)
class Observation:
    """The agent's view after a reset or a step."""

    screenshot: bytes  # encoded image: PNG, JPEG or WebP
    url: str
    title: str
    page_changed: bool  # pixels differ from the previous observation; numbers drawn on the elements do not count
    instruction: str | None = None
    error: str | None = None  # a failed action or an unexpected event of the page; the episode continues
    reward: float | None = None  # from the page, if done
    done: bool = False
    elements: tuple[Element, ...] | None = None  # None: the screenshot has no numbers
    tabs: tuple[OpenTab, ...] = ()  # if tabs are enabled
    scroll: Scroll | None = None
    not_recorded_requests: int = 0  # of the episode so far: requests of its pages that no recording answered (replay)
    seconds: StepSeconds | None = field(default=None, compare=False)


def _zeros(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    import numpy as np  # it takes a tenth of a second, and most commands and the control service do without it

    return np.zeros(shape, dtype)


MAX_REASONING_CHARS = 2_000


@dataclass(frozen=True)
class Step:
    """One observation -> response -> action, with exactly the tokens that the engine read and produced."""

    prompt_token_ids: np.ndarray  # int32 [prompt], image placeholders expanded
    response_token_ids: np.ndarray  # int32 [response]
    logprobs: np.ndarray  # float32 [response], behaviour policy, at the sampling temperature
    versions: np.ndarray  # int32 [response], policy version that produced each token
    images: np.ndarray  # int32 [images], indices into Trajectory.images, in prompt order
    image_grids: np.ndarray  # int32 [images, 3], patches (t, h, w) as the engine used them
    finish_reason: str  # "stop" or "length"
    action: Action | None  # None: the response had no valid action
    format_error: str | None = None
    url: str = ""  # of the page that the response acted on, as is the title
    title: str = ""
    page_changed: bool = False
    response_characters: int = 0  # of the decoded response, special tokens excluded
    reasoning: str = ""  # of the response: thoughts and what precedes the tool call, at most MAX_REASONING_CHARS
    memory_characters: int = -1  # of the Memory in the response; 0: it is empty, -1: there is none
    seconds_generation: float = 0.0
    seconds_browser: float = 0.0
    not_recorded_requests: int = 0  # of the episode, after the action: see Observation
    cached_prompt_tokens: int = 0  # prompt tokens found in the engine's prefix cache at the start of the request
    leniencies: tuple[str, ...] = ()  # names of the deviations that a lenient parser accepted, each once
    # float32 [response], log-probabilities of the teacher, NaN for tokens that it cannot score; [0] without a teacher
    teacher_logprobs: np.ndarray = field(default_factory=lambda: _zeros((0,), "float32"))
    # uint8 or uint16 [prompt + response - 1, MoE layers, top_k], experts of the tokens that the engine computed: of all
    # but the last, in the order of prompt and response. The dtype's maximum: not recorded. [0, 0, 0]: none of a step
    experts: np.ndarray = field(default_factory=lambda: _zeros((0, 0, 0), "uint8"))


@dataclass(frozen=True)
class JudgeStage:
    """One question to a judge model, and the reply that decided it."""

    name: str  # "relevance", "blocked", "supported", "rubric" or "reference"; other protocols have their own
    subject: str  # what was judged: "screenshot 3", a fact's number; empty for the whole episode
    decision: str  # "yes", "no", or "none" without a usable reply
    text: str  # the last reply, shortened
    digest: str  # of the request: prompts, images, model and sampling
    model: str
    attempts: int = 1
    errors: tuple[str, ...] = ()  # names of failed attempts, such as "truncated", in order


@dataclass(frozen=True)
class Vote:
    """One of several verdicts on an episode."""

    model: str
    outcome: str  # as of a verdict


@dataclass(frozen=True)
class Verdict:
    """How the outcome of an episode was decided."""

    outcome: str  # "success", "failure", or the reason that masks the episode
    evaluator: str  # such as "page", "judge", "all(page, judge)"
    protocol: str = ""  # of the judge: judge.protocol
    prompts: str = ""  # digest of the protocol's prompt files
    reason: str = ""  # one line
    stages: tuple[JudgeStage, ...] = ()
    credit: float = 0.0  # reward of a failure, below 1: with judge.graded the share of requirements that it fulfils
    calls: int = 0  # requests sent to judge models, failed ones included
    prompt_tokens: int = 0
    response_tokens: int = 0
    dollars: float = 0.0
    seconds: float = 0.0  # wall clock, waiting for other verdicts included
    votes: tuple[Vote, ...] = ()  # of which the outcome is the majority; none if there is one verdict only

    @property
    def votes_differ(self) -> bool:
        """Whether usable votes have different outcomes."""
        return len({vote.outcome for vote in self.votes} - {JUDGE_ERROR}) > 1


@dataclass(frozen=True)
class Trajectory:
    """One episode. `outcome` is "success", "failure", or the reason why the episode is masked."""

    ticket: int
    index: int  # 0..group_size-1 within the group
    group_size: int
    restart_epoch: int
    task: Task
    instruction: str
    steps: tuple[Step, ...]
    images: tuple[bytes, ...]  # encoded screenshots, each once; the last may follow the last step
    reward: float  # 1.0 success, 0.0 otherwise, but for the credit of a failure's verdict, which is below 1
    outcome: str
    temperature: float
    seconds: float  # wall clock of the episode
    finished_at: float = 0.0  # unix time, seconds
    worker: str = ""  # instance id of the rollout worker
    tries: int = 1  # the last one completed the episode; infrastructure faults ended the earlier ones
    discarded_tokens: int = 0  # response tokens of the earlier tries
    end_reason: str = ""  # how the episode ended: judge.outcome names the regular ends; else the reason of its mask
    page_reward: float | None = None  # the page's, if it gave one
    browser_images: tuple[int, ...] | None = None  # indices of the images that show the browser; None: all of them do
    verdict: Verdict | None = None  # None: the episode has not been evaluated

    @property
    def answer(self) -> str | None:
        """The text of the final `answer` action; None without one."""
        action = self.steps[-1].action if self.steps else None
        return action.text if action is not None and action.kind == "answer" else None

    @property
    def trainable(self) -> bool:
        """Whether the episode counts in its group's statistics and in the loss."""
        return self.outcome in TRAINABLE_OUTCOMES and any(len(s.response_token_ids) for s in self.steps)

    @property
    def is_trainable_success(self) -> bool:
        """Whether it is trainable and a success: a failure that is paid in part is none."""
        return self.trainable and self.reward == 1

    @property
    def response_tokens(self) -> int:
        """Response tokens of all steps."""
        return sum(len(step.response_token_ids) for step in self.steps)

    @property
    def oldest_version(self) -> int | None:
        """The lowest policy version among all response tokens; None without tokens."""
        return min((int(s.versions.min()) for s in self.steps if len(s.versions)), default=None)

    @property
    def newest_version(self) -> int | None:
        """The highest policy version among all response tokens; None without tokens."""
        return max((int(s.versions.max()) for s in self.steps if len(s.versions)), default=None)


@dataclass(frozen=True)
class Group:
    """The episodes of one ticket, which share a baseline."""

    ticket: int
    trajectories: tuple[Trajectory, ...]

    @property
    def has_one_task(self) -> bool:
        """Whether all episodes are of the same task, as they are unless workers have different task files."""
        return len({trajectory.task.id for trajectory in self.trajectories}) == 1

    @property
    def is_complete(self) -> bool:
        """Whether all episodes have ended by themselves; else those that have are the quick ones, a biased choice."""
        return len(self.trajectories) == self.trajectories[0].group_size and all(
            trajectory.outcome != ABORTED for trajectory in self.trajectories
        )


class TaskSite(Protocol):
    """What a browser session needs from a task source: open the page of a task, read its result."""

    @property
    def origins(self) -> frozenset[str]:
        """Origins that pages may reach, such as http://shop.localhost, or http://shop-*.localhost for many hosts."""
        ...

    @property
    def addresses(self) -> Mapping[str, str]:
        """Server by host name, such as {"shop.localhost": "127.0.0.1:8000"} (any free port); others are in DNS."""
        ...

    def can_reuse_page(self, task: Task) -> bool:
        """Whether `open` accepts the page of a finished episode of this task, in the same browser context."""
        return False

    async def open(self, page: Page, task: Task) -> str:
        """Load the start page of the task; returns the instruction."""
        ...

    async def result(self, page: Page, task: Task) -> tuple[float | None, bool]:
        """Reward (None until there is one) and whether the task is over."""
        ...
