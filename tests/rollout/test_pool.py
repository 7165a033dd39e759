"""The pool with real tickets, ring and browsers, weights offered as by a trainer, and a scripted engine."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.control.client import TicketClaim
from megatron_webrl.control.connection import Connection
from megatron_webrl.control.state import TICKETS
from megatron_webrl.judge.budget import BudgetSpent, LocalMeter
from megatron_webrl.judge.evaluation import page_verdict
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import RingFull
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.generator import NO_LIMITS, Generation, ResponseLimits
from megatron_webrl.rollout.group import TicketClaims
from megatron_webrl.rollout.pool import RolloutPool
from megatron_webrl.track import evaluations
from megatron_webrl.track.episodes import EpisodeStore
from megatron_webrl.track.evaluations import EvaluationRequest
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.data.group_source import GroupSource
from megatron_webrl.trainer.telemetry import EngineUtilization
from megatron_webrl.types import BUDGET_SPENT, TaskReference, Trajectory, Verdict
from tests.job_control import claim_tickets, connect, control_service, tickets
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

Place = tuple[Path, Ring]  # address file and ring of a job
LIMIT = 60.0  # seconds; CI machines are slow


class DelayedEngine:
    """Scripted responses with tokens of its version; delays or fails them on the test's request."""

    def __init__(self, episodes: EpisodeRunner) -> None:
        self.version, self.partially_updated, self.rank_hosts = -1, False, ["here"]
        self.answered: Counter[RemoteSession] = Counter()
        self.delays: Callable[[int], bool] = lambda answered: False
        self.asking = 0
        self.seen: list[tuple[int, int]] = []  # version taken, requests under way then
        self._script = ScriptedGenerator(episodes.agent.processor, episodes.config.rollout)
        self.released = asyncio.Event()

    async def generate(
        self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes],
        limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        self.asking += 1
        try:
            if self.delays(self.answered[session]):
                await self.released.wait()
            answer = await self._script.generate(session, token_ids, images)
        finally:
            self.asking -= 1
        self.answered[session] += 1
        return replace(answer, versions=np.full(len(answer.response_token_ids), self.version, np.int32))

    def check_alive(self) -> None: ...

    async def join_weight_link(self, *arguments: object) -> None: ...

    async def features(self) -> dict[str, bool]:
        return {"cuda_graphs": False, "async_scheduling": False}

    async def weight_load_paths(self) -> list[dict[str, dict[str, int]]]:
        return [{path: {"parameters": 0, "bytes": 0} for path in ("in_place", "reload")}]

    async def update_weights(self, version: int, transfer: int) -> float:
        self.seen.append((version, self.asking))
        self.version = version
        return 0.0


@dataclass
class Job:
    """A control service and a ring, with the trainer's side of both."""

    config: Config
    address: Path
    ring: Ring
    pools: list[RolloutPool] = field(default_factory=list)
    transfers: int = 0

    def __post_init__(self) -> None:
        self.trainer = connect(self.address, "trainer-0")
        self.accounting = Accounting()
        self.source = GroupSource(self.ring, self.config, ResumePoint(), self.accounting)
        self.trainer.put_json("weights/trainer", 1)
        self.trainer.put_json("weights/description", {"workers": self.config.worker_names})

    def drawn(self, tickets: Iterable[int]) -> dict[int, TaskReference]:
        source, seed = self.pools[0].episode_runner.task_source, self.config.run.seed
        return {ticket: TaskReference.of(source.training_task(seed, ticket)) for ticket in tickets}

    def open(self, limit: int) -> None:
        self.trainer.start_ticket_epoch(0, 0, self.drawn(range(limit)))

    def raise_limit(self, limit: int) -> None:
        self.trainer.issue_tickets(self.drawn(range(self.queue()["appended"], limit)))

    def queue(self) -> dict[str, Any]:
        read: dict[str, Any] = self.trainer.run("read_queue", TICKETS)
        return read

    async def offer(self, version: int, workers: Sequence[int] | None = None) -> None:
        """Offer weights to these workers (None: all), once they are linked."""
        links = {}
        for worker in range(len(self.pools)) if workers is None else workers:
            await self.until(lambda: self.trainer.get_json(f"engine/rollout-{worker}"))  # noqa: B023
            announced: Any = self.trainer.get_json(f"engine/rollout-{worker}")
            links[f"rollout-{worker}"] = announced["link_id"]
            self.trainer.put_json(f"weights/link/{announced['link_id']}", True)
        self.transfers += 1
        self.trainer.put_json("weights/offer", {"version": version, "transfer": self.transfers, "links": links})

    async def until(self, condition: Callable[[], object]) -> None:
        await eventually(condition, LIMIT)

    def account(self) -> dict[str, Any]:
        final: list[Any] = [self.trainer.get_json(f"final_counts/{pool.control.role}") for pool in self.pools]
        self.source.poll(0)
        unwritten = sum(each["unwritten"] for each in final)
        return self.accounting.summary(
            sum(each["finished"] for each in final), self.source.waiting_episodes() + unwritten
        )


@asynccontextmanager
async def job_of(episodes: EpisodeRunner, place: Place, *engines: DelayedEngine, **rollout: Any) -> AsyncIterator[Job]:
    """A job with a worker for each engine; the end of the context finishes the job."""
    config = replace(episodes.config, rollout=replace(episodes.config.rollout, engines=len(engines), **rollout))
    job = Job(config, *place)
    shared = replace(episodes, config=config)
    for worker, engine in enumerate(engines):
        control, name = connect(job.address, f"rollout-{worker}"), f"rollout-{worker}.1"
        control.start_heartbeat()
        engine_double: Any = engine
        weights = WeightClient(config, control, engine_double, name)
        store = EpisodeStore.of_worker(config, f"rollout-{worker}")
        pool = RolloutPool(config, control, job.ring, engine_double, shared, weights, store, name)
        job.pools.append(pool)
    async with AsyncExitStack() as stack:
        for pool in job.pools:
            stack.callback(pool.control.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for pool in job.pools:
            tasks.create_task(pool.run())
        try:
            yield job
        finally:
            job.trainer.end_job("finished")


class HeldEvaluator:
    """Gives verdicts by the page once the test permits them, or raises its `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.permitted, self.waiting, self.error = asyncio.Event(), 0, error

    async def evaluate(self, trajectory: Trajectory) -> Verdict:
        self.waiting += 1
        await self.permitted.wait()
        if self.error is not None:
            raise self.error
        return page_verdict(trajectory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def episodes(
    processor: Processor, tiny_model: Path, shared_browsers: BrowserConfig, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EpisodeRunner]:
    config = Config(
        run=RunConfig(directory=str(tmp_path_factory.mktemp("run"))),
        model=ModelConfig(path=str(tiny_model)),
        tasks=tasks_config(environments=["enter-text"], max_steps=3),
        browser=shared_browsers,
    )
    config.rollout = replace(config.rollout, group_size=2, groups_in_flight=4, max_model_len=4096, max_new_tokens=64)
    config.rollout.operation_timeout_seconds = 30
    async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes:
        yield episodes


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    name = f"webrl-test-{secrets.token_hex(4)}"
    ring = Ring.create_or_attach(name, 2**24, name)
    with control_service(tmp_path) as address:
        yield address, ring
    ring.unlink()
    ring.close()


async def test_async_weights_change_in_flight_and_old_groups_are_aborted(episodes: EpisodeRunner, place: Place) -> None:
    engine = DelayedEngine(episodes)
    engine.delays = lambda answered: answered == 1  # the second step of every episode
    async with job_of(episodes, place, engine, max_staleness=1) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: engine.asking == 2 and sum(engine.answered.values()) == 2)
        viewer = Connection(job.address, "viewer")
        await job.until(lambda: "training-0-1" in str(viewer.rollouts(())["workers"]))
        await job.offer(1)
        await job.until(lambda: engine.version == 1)
        assert job.pools[0]._status().startswith("version 1: 1 groups running, 0 episodes done")
        await job.offer(2)
        await job.until(lambda: (job.source.poll(2), job.source.dropped_tickets)[1])
        assert engine.seen == [(0, 0), (1, 2), (2, 2)]
        assert job.accounting.dropped == {"aborted": 2}
        assert job.accounting.tokens_dropped["aborted"] > 0  # of the steps that they had made
        engine.delays = lambda answered: False
        job.raise_limit(2)  # the replacement
        await job.until(
            lambda: (job.source.poll(2), job.source.waiting_episodes() + job.accounting.dropped["all_succeeded"])[1]
        )
        await job.until(lambda: engine.asking == 0)
    account = job.account()
    assert (account["matches"], account["finished"]) == (True, 4)


async def test_with_fixed_weights_no_group_is_in_flight_when_they_change(episodes: EpisodeRunner, place: Place) -> None:
    engine = DelayedEngine(episodes)
    async with job_of(episodes, place, engine, mode="sync") as job:
        await job.offer(0)
        job.open(limit=2)
        await job.until(lambda: job.pools[0].writer.written_episodes == 4)
        await job.offer(1)
        await job.until(lambda: engine.version == 1)
        engine.delays = lambda answered: True
        job.raise_limit(4)
        await job.until(lambda: engine.asking == 4)
        await job.offer(2)  # though the batch is incomplete: the trainer does not need its groups
        await job.until(lambda: engine.version == 2)
        assert engine.seen == [(0, 0), (1, 0), (2, 0)]
        await job.until(lambda: job.pools[0].writer.written_episodes == 8)
        job.source.poll(2)
        assert job.accounting.dropped["aborted"] == 4
        figures = EngineUtilization(job.trainer, ["rollout-0"]).pop_metrics()
        assert 0 < figures["engine/idle_fraction"] < 1
        assert 0 < figures["engine/running_requests"] <= figures["engine/running_episodes"] <= 4
    assert job.account()["matches"]


async def test_groups_that_wait_for_verdicts_hold_no_browsers_or_tickets(episodes: EpisodeRunner, place: Place) -> None:
    engine, evaluator = DelayedEngine(episodes), HeldEvaluator()
    slow: Any = evaluator
    async with job_of(replace(episodes, evaluator=slow), place, engine, groups_in_flight=1) as job:
        await job.offer(0)
        job.open(limit=5)  # 10 episodes; there are browsers for 8
        await job.until(lambda: evaluator.waiting == 10)
        assert job.pools[0]._status().endswith("0 groups running and 5 waiting for verdicts, 0 episodes done")
        assert job.pools[0].writer.written_episodes == 0
        evaluator.permitted.set()
        await job.until(lambda: job.pools[0].writer.written_episodes == 10)
    account = job.account()
    assert (account["matches"], account["finished"]) == (True, 10)


async def test_a_spent_budget_stops_the_job_and_loses_no_episode(episodes: EpisodeRunner, place: Place) -> None:
    engine, evaluator = DelayedEngine(episodes), HeldEvaluator(BudgetSpent("4 calls this hour"))
    spent: Any = evaluator
    async with job_of(replace(episodes, evaluator=spent), place, engine, groups_in_flight=2) as job:
        await job.offer(0)
        job.open(limit=8)
        await job.until(lambda: evaluator.waiting == 4)
        evaluator.permitted.set()
        await job.until(job.trainer.stop_requested)
        assert job.trainer.requested_outcome() == BUDGET_SPENT
        job.trainer.report_progress()
    tickets = job.trainer.job_status()["tickets"]
    assert tickets["in_progress"] == tickets["claimed"] >= 2  # every one is still open: a resumed job runs it again
    assert job.account()["matches"]


async def test_a_worker_with_outdated_weights_claims_no_ticket(episodes: EpisodeRunner, place: Place) -> None:
    left_out, other = (DelayedEngine(episodes) for _ in range(2))
    async with job_of(episodes, place, left_out, other, max_staleness=1) as job:
        await job.offer(0)
        await job.until(lambda: left_out.version == other.version == 0)
        for version in (1, 2):
            await job.offer(version, workers=[1])
            await job.until(lambda: other.version == version)  # noqa: B023
        await job.until(lambda: "waiting for new weights" in job.trainer.status_of("rollout-0"))
        job.open(limit=3)
        await job.until(lambda: job.pools[1].writer.written_episodes == 6)
        assert job.pools[0].finished_episodes == 0
        await job.offer(3)
        await job.until(lambda: left_out.version == 3)
        other.delays = lambda answered: True
        job.raise_limit(8)
        await job.until(lambda: job.pools[0].writer.written_episodes)
    assert job.account()["matches"]


async def test_a_worker_claims_its_share_of_the_free_tickets(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        connect(address, "trainer-0").start_ticket_epoch(0, 0, tickets(range(4)))
        claims, found = TicketClaims(connect(address, "rollout-0"), engines=2), []
        await eventually(lambda: found.extend(claims.claim(4)) or found)
        assert [claim.ticket for claim in found] == [0, 1]


async def test_a_worker_waits_for_weights_of_a_restarted_trainer(episodes: EpisodeRunner, place: Place) -> None:
    engine = DelayedEngine(episodes)
    async with job_of(episodes, place, engine) as job:
        await job.offer(3)
        job.open(limit=1)
        await job.until(lambda: job.pools[0].writer.written_episodes == 2)
        await job.until(lambda: not job.queue()["open"])
        job.trainer.put_json("weights/trainer", 2)
        job.transfers = 0  # it counts its own
        assert job.trainer.rewind_tickets() == ([(0, 0)], {}, 1)
        job.trainer.start_ticket_epoch(1, 2, job.drawn(range(2)))
        announced = lambda: job.trainer.get_json("engine/rollout-0")["trainer"] == 2  # type: ignore[index]  # noqa: E731
        await job.until(lambda: announced() and "new weights" in job.trainer.status_of("rollout-0"))
        await job.until(lambda: not job.queue()["open"])  # others can claim them
        assert job.pools[0].writer.written_episodes == 2
        await job.offer(2)
        await job.until(lambda: job.pools[0].writer.written_episodes == 6)
        made = [decode_trajectory(job.ring.read(number)) for number in job.ring.committed()]
        assert Counter((each.ticket, each.restart_epoch) for each in made) == {(0, 0): 2, (0, 1): 2, (1, 1): 2}


async def test_tickets_of_cancelled_groups_are_claimed_again(episodes: EpisodeRunner, place: Place) -> None:
    engine, asked = DelayedEngine(episodes), list[int]()
    engine.delays = lambda answered: asked.append(answered) or (answered == 0 and len(asked) > 1)  # all but one episode
    async with job_of(episodes, place, engine) as job:
        await job.offer(0)
        job.open(limit=2)
        await job.until(lambda: engine.asking == 3 and job.pools[0].finished_episodes == 1)
        assert len(job.queue()["open"]) == 2
        request = EvaluationRequest(1, "after", tasks=1, samples=1, temperature=0.0, version=0, exclusive=True)
        evaluations.submit_request(job.trainer, request)
        await job.until(lambda: not job.queue()["open"])
        claimed: list[int] = []  # a claim of the worker that waits may take them first, and returns them
        claim = lambda: claimed.extend(ticket for ticket, *_ in job.trainer.claim(TICKETS, "rollout-1.1", 2))  # noqa: E731
        await job.until(lambda: claim() or len(claimed) == 2)  # type: ignore[func-returns-value]
        assert sorted(claimed) == [0, 1]
        assert engine.asking <= 1  # of the evaluation
        assert job.pools[0].finished_episodes == 1
        engine.released.set()


async def test_the_end_of_the_job_ends_the_wait_for_room_in_the_ring_and_the_ticket_stays_open(
    episodes: EpisodeRunner, place: Place
) -> None:
    for size in (2**20, 2**12, 2**6):
        with suppress(RingFull):
            while True:
                place[1].write([bytes(size)], 0.0)
    engine = DelayedEngine(episodes)
    async with asyncio.timeout(LIMIT), job_of(episodes, place, engine) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: job.pools[0].finished_episodes == 2)
    counts = {"instance_id": "rollout-0.1", "finished": 2, "unwritten": 2}
    assert job.trainer.get_json("final_counts/rollout-0") == counts
    assert [ticket for ticket, _ in job.queue()["open"]] == [0]  # a resumed job runs its group again


async def test_a_restarted_worker_resumes_all_groups_that_it_left_as_it_has_room(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        connect(address, "trainer-0").start_ticket_epoch(0, 0, tickets(range(4)))
        worker = connect(address, "rollout-0")
        assert len(claim_tickets(worker, 3)) == 3
        claims = TicketClaims(worker, engines=1)
        found = [claims.claim(room) for room in (0, 1, 1)]
        assert [[claim.ticket for claim in each] for each in found] == [[], [0], [1]]
        last: list[TicketClaim] = []
        await eventually(lambda: last.extend(claims.claim(2 - len(last))) or len(last) == 2)
        assert [claim.ticket for claim in last] == [2, 3]
