"""Task sampling through coordinator, ring, control service and checkpoint state; its bookkeeping; the block list."""

from __future__ import annotations

import json
import random
import secrets
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.config.tasks import GrowingStepsConfig, SamplerConfig, TasksConfig, tasks_config
from megatron_webrl.control.client import TicketClaim
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.ring.record import encode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.tasks.files.table import FileDigest
from megatron_webrl.tasks.mix import referenced_task
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tasks.sampler import knowledge, samplers
from megatron_webrl.tasks.sampler.knowledge import SamplerKnowledge
from megatron_webrl.track.metrics import UpdateSeconds
from megatron_webrl.track.upload import Tracker
from megatron_webrl.trainer import coordinator as coordinators
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState, read_trainer_state
from megatron_webrl.trainer.checkpoint.recovery import make_resume_point
from megatron_webrl.trainer.coordinator import Coordinator
from megatron_webrl.trainer.data import group_source
from megatron_webrl.trainer.data.task_sampler import BLOCK_LIST_FILE as FILE
from megatron_webrl.trainer.data.task_sampler import BlockList, TaskSampler
from megatron_webrl.trainer.metrics.logprob_mismatch import LagMismatch, LogprobMismatch
from megatron_webrl.trainer.telemetry import UpdateResult
from megatron_webrl.types import Group, Task, Trajectory
from tests.job_control import claim_tickets, connect, control_service
from tests.trainer.multi_node.nodes import one_node_exchange
from tests.trainer.ranks import results
from tests.trajectories import trajectory

SKILL = {"click-test": 0.98, "click-tab": 0.5, "enter-text": 0.1, "focus-text": 0.8, "click-link": 0.02}
ALONE = tasks_config(environments=list(SKILL), sampler=SamplerConfig("curriculum"))
MIXED = tasks_config("mix", sampler=SamplerConfig("curriculum"), mix=[
    {"source": "miniwob", "environments": list(SKILL)[:3], "weight": 2},
    {"source": "miniwob", "name": "others", "environments": list(SKILL)[3:]},
])  # fmt: skip
UPDATES, GROUP, IN_FLIGHT = 8, 4, 8
TOKEN_TOTALS = ("response_tokens", "success_tokens", "entropy", "success_entropy", "tokens")
METRICS = dict.fromkeys((*TOKEN_TOTALS, "loss", "gradient_norm", "gradient_clipped", "learning_rate"), 1.0)
MISMATCH = LogprobMismatch({1: LagMismatch(4, 0.2, 0.9, 1.0, 0.5)})


def run(_: Any, folder: Path) -> dict[str, dict[str, Any]]:
    group_source.POLL_SECONDS = 0.001
    return {
        f"{name}{number}": Run(folder, f"{name}{number}", tasks).run(ends)
        for number, tasks in enumerate((ALONE, MIXED)) for name, ends in (("whole", ()), ("resumed", (4,)))
    }  # fmt: skip


class Run:
    """One run with restarts from checkpoints, in which a coordinator and a worker alternate.

    The worker runs several tickets at a time and finishes the oldest at every poll of the trainer, so the order of
    groups does not depend on the machine. An episode succeeds at random, seeded by its task.
    """

    def __init__(self, folder: Path, name: str, tasks: TasksConfig) -> None:
        self.config, self.folder = Config(), folder
        self.config.run.directory, self.config.run.name, self.config.run.seed = str(folder), name, 5
        self.config.tasks = tasks
        self.config.trainer.updates, self.config.trainer.groups_per_update = UPDATES, 3
        # Many tickets in flight and fast estimates: a ticket that changed its state would change its task.
        knowledge.LATEST_GROUP_WEIGHT, self.config.rollout.max_staleness = 0.8, 4
        self.config.run_folder.mkdir()
        (self.config.run_folder / "config.yaml").touch()
        self.source = make_source(tasks)
        self.tasks: dict[int, set[str]] = {}  # ticket -> its task ids
        self.in_flight: deque[list[Trajectory]] = deque()

    def run(self, ends: Iterable[int]) -> dict[str, Any]:
        """Run to the end, with a restart from a checkpoint after each of the versions `ends`."""
        state, open_tickets, found = TrainerState(0, 0, 0, (), Accounting().state_dict(), 0), [], dict[str, Any]()
        with closing(self.source):
            for end in (*ends, UPDATES):
                if state.version:
                    (self.config.run_folder / "state.json").write_text(json.dumps(asdict(state)))
                    read = read_trainer_state(self.config.run_folder)
                    state = replace(read, restart_epoch=read.restart_epoch + 1)
                    open_tickets.append(state.open_tickets)
                state, found = self._run_until(state, end)
        updates = [json.loads(line) for line in (self.config.run_folder / "updates.jsonl").read_text().splitlines()]
        return found | {
            "tasks": self.tasks, "open": open_tickets, "base": state.closed_tickets, "figures": updates[-1]["extra"],
        }  # fmt: skip

    def _run_until(self, state: TrainerState, end: int) -> tuple[TrainerState, dict[str, Any]]:
        """Train up to version `end`, with a new control service and ring. Unfinished groups are lost."""
        name = f"webrl-test-{secrets.token_hex(4)}"
        with ExitStack() as stack:
            address = stack.enter_context(control_service(self.folder))
            ring = stack.enter_context(Ring.create_or_attach(name, 2**21, name))
            ring.unlink()
            control, worker, exchange = (
                connect(address, "trainer-0"),
                connect(address, "rollout-0"),
                one_node_exchange(ring),
            )
            resume_point = make_resume_point(control, exchange, state, self.config.run_folder, True)
            tracker = Tracker(self.config)
            coordinator = Coordinator(self.config, control, exchange, state, resume_point, tracker)
            coordinator.open_job(state.version)
            self.in_flight.clear()
            for version in range(state.version, end):
                groups = coordinator.collect(version, lambda: self._work(coordinator, worker, ring, version))  # noqa: B023
                if version + 1 == end:
                    with mock.patch.object(coordinators.log, "warning") as warning:
                        coordinator.log_update(
                            UpdateResult(end, groups, METRICS, MISMATCH, UpdateSeconds(1, 1, 1, 1, 0), {})
                        )
                    warned = [call.args[0] % call.args[1:] for call in warning.call_args_list]
                coordinator.close_update(groups, version + 1)
            sampler = coordinator.task_sampler
            assert sampler is not None
            return coordinator.trainer_state(end), {
                "rates": {"": sampler.knowledge.passes}
                | {part: known.passes for part, known in sampler.knowledge.parts.items()},
                "kept_tasks": len(sampler.tasks),
                "warned": warned,
            }  # fmt: skip

    def _work(self, coordinator: Coordinator, worker: Any, ring: Ring, version: int) -> bool:
        """Claim tickets, and finish one if the trainer lacks groups."""
        for claim in claim_tickets(worker, IN_FLIGHT - len(self.in_flight)):
            self.in_flight.append(self._run_ticket(claim, version))
        if len(coordinator.group_source._ready) < self.config.trainer.groups_per_update:
            for each in self.in_flight.popleft():
                ring.write(encode_trajectory(each), 10.0)
        return False

    def _run_ticket(self, claim: TicketClaim, version: int) -> list[Trajectory]:
        task = referenced_task(self.source, claim.task)
        self.tasks.setdefault(claim.ticket, set()).add(task.id)
        chance, options = random.Random(task.id), {"version": version, "restart_epoch": claim.restart_epoch}
        rewards = [float(chance.random() < SKILL[task.environment]) for _ in range(GROUP)]
        made = [trajectory(claim.ticket, i, reward=r, group_size=GROUP, **options) for i, r in enumerate(rewards)]
        return [replace(each, task=task) for each in made]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    (found,) = results(run, tmp_path_factory.mktemp("runs"), ranks=1)
    return found


@pytest.mark.parametrize("number", [0, 1], ids=["alone", "mixed"])
def test_a_resumed_run_continues_with_the_tasks_of_an_uninterrupted_one(
    runs: dict[str, dict[str, Any]], number: int
) -> None:
    whole, resumed = runs[f"whole{number}"], runs[f"resumed{number}"]
    assert not whole["open"]
    assert len(resumed["open"]) == 1
    assert all(len(tickets) >= 7 for tickets in resumed["open"])  # they were in flight, and are issued again
    assert len(whole["tasks"]) > 35
    assert all(len(tasks) == 1 for tasks in resumed["tasks"].values())
    for name in ("tasks", "rates", "base"):
        assert resumed[name] == whole[name], name
    assert {part for part, passes in whole["rates"].items() if passes} == ({"miniwob", "others"} if number else {""})
    for each in (whole, resumed):
        assert 1 < each["kept_tasks"] <= 15  # of open tickets: 3 groups of each of 5 updates
    closed = [resumed["figures"][f"sampler/closed_tickets/{name}"] for name in SKILL]
    assert sum(closed) == resumed["base"] - 3  # taken before the update's own groups are closed
    # An update warns of a trainer far from the engine.
    assert whole["figures"]["logprob_mismatch/kl/lag_1"] == 0.9
    (warning,) = whole["warned"]
    assert warning.startswith(f"update {UPDATES}: ")
    assert "0.9 nats" in warning


TWO = tasks_config(environments=["click-test", "click-tab"], sampler=SamplerConfig("curriculum"))
BY_WEBSITE = tasks_config(source="webgym", train_file="train.jsonl", sampler=SamplerConfig("curriculum", per="website"))


def group(ticket: int, environment: str, *outcomes: str, website: str = "", task_id: str = "") -> Group:
    made = [trajectory(ticket, i, outcome=outcome, group_size=len(outcomes)) for i, outcome in enumerate(outcomes)]
    task = replace(made[0].task, id=task_id or f"task {ticket}", environment=environment, website=website)
    return Group(ticket, tuple(replace(each, task=task) for each in made))


@pytest.fixture(autouse=True)
def simple_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samplers that halve the distance to the latest pass rate and draw by it alone."""
    monkeypatch.setattr(knowledge, "LATEST_GROUP_WEIGHT", 0.5)
    monkeypatch.setattr(samplers, "UNIFORM_FRACTION", 0.0)


class Rows:
    """A source whose tickets draw websites in turn, without blocked ones."""

    def training_task(self, seed: int, ticket: int, known: SamplerKnowledge) -> Task:
        websites = [name for name in ("a.example", "b.example") if name not in known.blocked]
        return Task(f"row {ticket}", "web", "page", ticket, known.version, website=websites[ticket % len(websites)])

    def close(self) -> None: ...


def opened(
    folder: Path, saved: Any = None, tasks: TasksConfig = TWO, version: int = 0, source: Any = None, **options: Any
) -> TaskSampler:
    """A sampler; `saved` as a checkpoint stores it."""
    config = Config()
    config.tasks, config.run.directory = tasks, str(folder)
    config.run_folder.mkdir(exist_ok=True)
    source = source or (Rows() if tasks.from_files else make_source(tasks))
    return TaskSampler(config, source, json.loads(json.dumps(saved)), version, **options)


def test_groups_move_the_pass_rates_and_masked_or_missing_episodes_do_not(tmp_path: Path) -> None:
    sampler = opened(tmp_path)
    sampler.record_group(group(0, "click-test", "success", "browser_crashed", "failure", "success", "success"))
    sampler.record_group(group(1, "click-tab", "browser_crashed", "success", "aborted"))
    sampler.record_group(group(2, "click-test", "failure", "failure"))
    sampler.record_group(Group(3, group(3, "click-tab", "success", "success", "failure").trajectories[:2]))
    assert [sampler.pass_rate(name) for name in TWO.environments] == [0.3125, 0.5]  # 0.5, 0.625, 0.3125
    assert sampler.closed_tickets == {"click-test": 2, "click-tab": 2}
    probabilities = [sampler.metrics()[f"sampler/probability/{name}"] for name in TWO.environments]
    assert probabilities == pytest.approx([0.4622, 0.5378], 1e-3)


def test_a_ticket_keeps_its_task_until_it_is_closed_and_a_checkpoint_has_it(tmp_path: Path) -> None:
    sampler = opened(tmp_path)
    drawn = sampler.draw(range(40), 0)
    assert {task.environment for task in drawn.values()} == {"click-test", "click-tab"}
    for ticket in range(20):
        sampler.record_group(group(ticket, "click-test", "success"))
    assert {task.environment for task in sampler.draw(range(40, 60), 0).values()} == {"click-tab"}
    resumed = opened(tmp_path, sampler.state_dict())
    assert resumed.draw(range(20, 40), 5) == {ticket: drawn[ticket] for ticket in range(20, 40)}
    assert resumed.draw(range(60, 80), 1) == sampler.draw(range(60, 80), 1)
    assert resumed.tasks.keys() == set(range(20, 80))


def test_other_environments_after_a_resume_keep_what_is_known(tmp_path: Path) -> None:
    sampler = opened(tmp_path)
    drawn = sampler.draw([0, 1], 0)
    sampler.record_group(group(0, "click-test", "success"))
    three = replace(TWO, environments=["focus-text", "click-test", "click-link"])
    resumed = opened(tmp_path, sampler.state_dict(), three)
    assert [resumed.pass_rate(name) for name in three.environments] == [0.5, 0.75, 0.5]
    assert resumed.draw([1], 0) == {1: drawn[1]}
    resumed.record_group(group(1, "click-tab", "success"))
    assert resumed.closed_tickets == {"click-test": 1}


def test_another_source_or_unit_after_a_resume_forgets_what_does_not_fit(tmp_path: Path) -> None:
    sampler = opened(tmp_path, tasks=BY_WEBSITE)
    drawn = sampler.draw([0, 1], 3)
    sampler.block_list.record_group(group(2, "page", "blocked", "success", website="a.example"))
    sampler.record_group(group(2, "page", "blocked", "success", website="a.example"))
    by_task = opened(tmp_path, sampler.state_dict(), replace(BY_WEBSITE, sampler=SamplerConfig("curriculum")), 7)
    assert (by_task.knowledge.passes, by_task.knowledge.version) == ({}, 7)
    assert by_task.draw([0, 1], 7) == drawn
    assert list(by_task.knowledge.blocked) == ["a.example"]
    other = opened(tmp_path, sampler.state_dict())
    assert other.tasks == other.knowledge.passes == {}


def test_a_sampler_that_does_not_adapt_learns_no_pass_rates(tmp_path: Path) -> None:
    for name, weights in (("uniform", {}), ("ratio", {"click-test": 1.0})):
        sampler = opened(tmp_path, tasks=tasks_config(sampler=SamplerConfig(name, weights=weights)))
        sampler.record_group(group(0, "click-test", "success"))
        assert sampler.knowledge.passes == sampler.metrics() == {}, name


def test_a_growing_step_limit_is_that_of_the_version_of_the_draw(tmp_path: Path) -> None:
    tasks = tasks_config(growing_steps=GrowingStepsConfig(interval=10, initial=6, max=26, cap_step=40))
    sampler = opened(tmp_path, tasks=tasks)
    for first, version in ((0, 0), (20, 15), (40, 40)):
        sampler.draw(range(first, first + 20), version)
    assert sampler.metrics() == {"sampler/step_limit": 26.0}
    resumed = opened(tmp_path, sampler.state_dict(), tasks)
    assert [task.max_steps for task in resumed.draw(range(60), 50).values()] == [6] * 20 + [11] * 20 + [26] * 20


def test_no_ticket_draws_a_blocked_website_also_after_a_restart_from_an_older_checkpoint(tmp_path: Path) -> None:
    sampler = opened(tmp_path, tasks=BY_WEBSITE)
    before = sampler.draw(range(6), 0)
    checkpoint = sampler.state_dict()
    sampler.block_list.record_group(group(0, "page", "blocked", website="a.example"))
    assert sampler.draw(range(6), 0) == before  # open tickets keep their tasks
    for each in (sampler, opened(tmp_path, checkpoint, BY_WEBSITE)):
        assert list(each.knowledge.blocked) == ["a.example"]


def test_a_group_of_several_tasks_teaches_no_pass_rate(tmp_path: Path) -> None:
    sampler = opened(tmp_path, tasks=BY_WEBSITE)
    [first], [second] = (group(0, "page", "success", website="a", task_id=name).trajectories for name in "xy")
    sampler.record_group(Group(0, (first, second)))
    sampler.record_group(group(1, "page", "success", website="b"))
    assert list(sampler.knowledge.passes) == ["b"]


def test_metrics_of_a_task_file_have_blocks_and_pass_rates(tmp_path: Path) -> None:
    tasks = replace(BY_WEBSITE, sampler=SamplerConfig("curriculum", per="difficulty"))
    sampler = opened(tmp_path, tasks=tasks)
    for ticket, (website, task_id) in enumerate([("a", "1"), ("b", "2"), ("a", "3"), ("b", "2"), ("b", "2")]):
        sampler.record_group(group(ticket, "page", "success", website=website, task_id=task_id))
    resumed = opened(tmp_path, sampler.state_dict(), tasks)
    assert resumed.metrics() == sampler.metrics() == {
        "blocked_websites": 0.0, "block_list/added": 0.0,
        "sampler/pass_rate/easy": 1 - 0.5**6, "sampler/pass_rate/medium": 0.5, "sampler/pass_rate/hard": 0.5,
    }  # fmt: skip


def test_a_checkpoint_of_another_training_file_is_refused(tmp_path: Path) -> None:
    def files(path: str, train: str, test: str) -> dict[str, FileDigest]:
        return {"tasks.train_file": FileDigest(path, train), "tasks.test_file": FileDigest("test.jsonl", test)}

    saved = opened(tmp_path, files=files("train.jsonl", "aa", "bb")).state_dict()
    opened(tmp_path, saved, files=files("moved.jsonl", "aa", "cc"))
    with pytest.raises(JobFailed, match=r"^tasks\.train_file=train\.jsonl has the digest cc, but .* aa, .* a new run"):
        opened(tmp_path, saved, files=files("train.jsonl", "cc", "bb"))


HOUR = 3600.0


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def on_site(ticket: int, website: str, *outcomes: str) -> Group:
    return group(ticket, "page", *outcomes, website=website)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_a_website_is_blocked_by_any_blocked_episode_until_its_time_is_over(tmp_path: Path) -> None:
    blocked: dict[str, float] = {}
    clock = Clock()
    block_list = BlockList(blocked, tmp_path / FILE, clock)
    block_list.record_group(on_site(3, "a.example", "success", "blocked", "failure"))
    block_list.record_group(on_site(4, "b.example", "failure", "judge_error"))
    clock.now += HOUR
    block_list.record_group(on_site(5, "a.example", "blocked"))  # does not prolong it
    block_list.record_group(on_site(6, "c.example", "blocked", "blocked"))
    assert blocked.keys() == {"a.example", "c.example"}
    assert block_list.pop_metrics() == {"blocked_websites": 2.0, "block_list/added": 2.0}
    clock.now += 10.9 * HOUR
    block_list.remove_expired()
    assert blocked.keys() == {"a.example", "c.example"}
    clock.now += 0.1 * HOUR
    block_list.remove_expired()
    assert blocked.keys() == {"c.example"}
    assert block_list.pop_metrics() == {"blocked_websites": 1.0, "block_list/added": 0.0}
    block_list.record_group(on_site(9, "a.example", "blocked"))
    assert blocked.keys() == {"a.example", "c.example"}
    assert lines(tmp_path) == [
        {"time": 1000.0, "website": "a.example", "event": "blocked", "until": 44200.0, "ticket": 3},
        {"time": 4600.0, "website": "c.example", "event": "blocked", "until": 47800.0, "ticket": 6},
        {"time": 44200.0, "website": "a.example", "event": "unblocked", "until": 44200.0, "ticket": None},
        {"time": 44200.0, "website": "a.example", "event": "blocked", "until": 87400.0, "ticket": 9},
    ]


def test_blocks_of_the_file_that_last_are_restored(tmp_path: Path) -> None:
    clock = Clock()
    block_list = BlockList({}, tmp_path / FILE, clock)
    for ticket, website in enumerate(("early.example", "a.example", "b.example")):
        block_list.record_group(on_site(ticket, website, "blocked"))
        clock.now += HOUR
    with (tmp_path / FILE).open("a") as file:
        file.write('{"time": 1, "webs')
    clock.now = 1000.0 + 12 * HOUR
    older = {"b.example": 5e9}
    restored = BlockList(older, tmp_path / FILE, clock)
    restored.restore()
    restored.restore()
    assert older == {"a.example": 1000.0 + 13 * HOUR, "b.example": 5e9}
    assert len((tmp_path / FILE).read_text().splitlines()) == 4


def test_only_the_website_of_the_blocked_episode_is_blocked(tmp_path: Path) -> None:
    blocked: dict[str, float] = {}
    block_list = BlockList(blocked, tmp_path / FILE)
    block_list.record_group(on_site(0, "", "blocked"))
    assert not blocked
    [first], [second] = on_site(0, "a.example", "failure").trajectories, on_site(0, "b.example", "blocked").trajectories
    block_list.record_group(Group(0, (first, second)))
    assert blocked.keys() == {"b.example"}
