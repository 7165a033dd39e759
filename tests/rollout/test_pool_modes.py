"""The pool at work: real tickets, ring and browsers; weights offered as a trainer does; an engine of scripts."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from torch.distributed import TCPStore

from megatron_webrl.config import Config, ModelConfig, RunConfig, TasksConfig
from megatron_webrl.control import Control, Start
from megatron_webrl.farm.client import RemoteSession
from megatron_webrl.model.processing import Processor
from megatron_webrl.ring.record import decode
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.demonstrate import ScriptedResponder
from megatron_webrl.rollout.episodes import Episodes
from megatron_webrl.rollout.evaluation import Evaluator
from megatron_webrl.rollout.generation import Generation, GenerationError
from megatron_webrl.rollout.pace import Lockstep
from megatron_webrl.rollout.pool import Pool
from megatron_webrl.rollout.refresh import Refresh
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.beginning import Beginning
from megatron_webrl.trainer.groups import GroupSource
from megatron_webrl.trainer.utilization import Utilization

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMIT = 60.0  # seconds; CI machines are slow


class Engine:
    """Answers by script with tokens of its version; holds answers back, or fails, where the test says so."""

    def __init__(self, processor: Processor, config: Config) -> None:
        self.version, self.torn, self.hosts = -1, False, ["here"]
        self.answered: Counter[RemoteSession] = Counter()
        self.holds: Callable[[int], bool] = lambda answered: False
        self.failures = 0  # answers that are still to fail
        self.asking = 0
        self.seen: list[tuple[int, int]] = []  # version taken, requests under way then
        self._script = ScriptedResponder(processor, config.rollout.context, config.rollout.max_new_tokens)
        self.released = asyncio.Event()

    async def respond(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        self.asking += 1
        try:
            if self.holds(self.answered[session]):
                await self.released.wait()
            if self.failures:
                self.failures -= 1
                raise GenerationError("the engine does not feel like it")
            answer = await self._script.respond(session, token_ids, images)
        finally:
            self.asking -= 1
        self.answered[session] += 1
        return replace(answer, versions=np.full(len(answer.response_token_ids), self.version, np.int32))

    def check_alive(self) -> None: ...

    async def join_weights(self, *arguments: object) -> None: ...

    async def receive_weights(self, version: int, transfer: int) -> float:
        self.seen.append((version, self.asking))
        self.version = version
        return 0.0


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def episodes(
    processor: Processor, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Episodes]:
    """Browsers and tasks for all tests: two steps each."""
    config = Config(
        run=RunConfig(directory=str(tmp_path_factory.mktemp("run"))),
        model=ModelConfig(path=str(tiny_model)),
        tasks=TasksConfig(environments=["enter-text"], max_steps=3),
    )
    config.rollout = replace(
        config.rollout, group_size=2, groups_in_flight=4, max_model_len=4096, max_new_tokens=64, step_seconds=30
    )
    config.browser.width, config.browser.height, config.browser.screenshot = 160, 210, "png"
    async with Episodes.open(config, processor, "rollout-0") as episodes:
        yield episodes


@dataclass
class Job:
    """A control plane and a ring, with the trainer's side of both."""

    config: Config
    store: TCPStore
    ring: Ring
    pools: list[Pool] = field(default_factory=list)
    transfers: int = 0

    def __post_init__(self) -> None:
        self.trainer = self.control("trainer-0")
        self.accounting = Accounting()
        self.source = GroupSource(self.ring, self.config, Beginning.first(), self.accounting)
        self.trainer.put("weights/trainer", 1)
        self.trainer.put("weights/description", {})

    def control(self, role: str) -> Control:
        return Control("127.0.0.1", self.store.port, role, LIMIT)

    def open(self, limit: int) -> None:
        self.trainer.open_job(Start(0, 0, 0, (), 0), limit)

    async def offer(self, version: int, workers: Sequence[int] | None = None) -> None:
        """Weights to these workers, None for all, once they are linked."""
        lives = {}
        for worker in range(len(self.pools)) if workers is None else workers:
            await self.until(lambda: self.trainer.value(f"engine/rollout-{worker}"))  # noqa: B023
            announced: Any = self.trainer.value(f"engine/rollout-{worker}")
            lives[f"rollout-{worker}"] = announced["life"]
            self.trainer.put(f"weights/link/{announced['life']}", True)
        self.transfers += 1
        self.trainer.put("weights/offer", {"version": version, "transfer": self.transfers, "lives": lives})

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                await asyncio.sleep(0.02)

    def account(self) -> dict[str, Any]:
        """The accounting at the end, as the trainer makes it."""
        final: list[Any] = [self.trainer.value(f"final/rollout-{worker}") for worker in range(len(self.pools))]
        self.source.poll(0)
        held = sum(each["held"] for each in final)
        return self.accounting.summary(sum(each["finished"] for each in final), self.source.waiting() + held)


@pytest.fixture
def ring() -> Iterator[Ring]:
    name = f"webrl-test-{secrets.token_hex(4)}"
    ring = Ring.create_or_attach(name, 2**24, name)
    yield ring
    ring.unlink()
    ring.close()


@asynccontextmanager
async def job_of(episodes: Episodes, ring: Ring, *engines: Engine, **rollout: Any) -> AsyncIterator[Job]:
    """A job with a worker for each engine; ends with its context in good order."""
    config = replace(episodes.config, rollout=replace(episodes.config.rollout, engines=len(engines), **rollout))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=LIMIT))
    job = Job(config, store, ring)
    shared = replace(episodes, config=config)
    if config.rollout.stepping == "lockstep":
        shared.pacing = Lockstep(config.rollout.step_seconds)
    for worker, engine in enumerate(engines):
        control, name = job.control(f"rollout-{worker}"), f"rollout-{worker}.1"
        standing_in: Any = engine
        refresh = Refresh(config, control, standing_in, worker, name)
        evaluator = Evaluator(config, control, standing_in, shared, name)
        job.pools.append(Pool(config, control, ring, standing_in, shared, refresh, evaluator, name))
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for pool in job.pools:
            tasks.create_task(pool.run())
        try:
            yield job
        finally:
            job.trainer.finish("finished")


async def test_in_mode_async_weights_enter_in_flight_and_groups_that_grow_too_old_are_given_up(
    episodes: Episodes, processor: Processor, ring: Ring
) -> None:
    engine = Engine(processor, episodes.config)
    engine.holds = lambda answered: answered == 1  # the second step of every episode
    async with job_of(episodes, ring, engine, max_staleness=1) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: engine.asking == 2 and sum(engine.answered.values()) == 2)
        await job.offer(1)
        await job.until(lambda: engine.version == 1)
        assert job.pools[0]._status().startswith("version 1: 1 groups running, 0 episodes done")
        await job.offer(2)
        await job.until(lambda: (job.source.poll(2), job.source.dropped_tickets)[1])
        assert engine.seen == [(0, 0), (1, 2), (2, 2)]
        assert job.accounting.dropped == {"abandoned": 2}
        assert job.accounting.tokens_dropped["abandoned"] > 0  # of the steps that they had made
        engine.holds = lambda answered: False
        job.trainer.set_limit(2)  # the one in its place
        await job.until(lambda: (job.source.poll(2), job.source.waiting() + job.accounting.dropped["all_succeeded"])[1])
        await job.until(lambda: engine.asking == 0)
    account = job.account()
    assert account["matches"]
    assert account["finished"] == 4


async def test_with_fixed_weights_nothing_is_in_flight_when_they_change(
    episodes: Episodes, processor: Processor, ring: Ring
) -> None:
    engine = Engine(processor, episodes.config)
    async with job_of(episodes, ring, engine, mode="sync") as job:
        await job.offer(0)
        job.open(limit=2)
        await job.until(lambda: job.pools[0].written == 4)
        await job.offer(1)
        await job.until(lambda: engine.version == 1)
        engine.holds = lambda answered: True
        job.trainer.set_limit(4)
        await job.until(lambda: engine.asking == 4)
        await job.offer(2)  # though it has not got them: it does not want them
        await job.until(lambda: engine.version == 2)
        assert engine.seen == [(0, 0), (1, 0), (2, 0)]
        await job.until(lambda: job.pools[0].written == 8)
        job.source.poll(2)
        assert job.accounting.dropped["abandoned"] == 4
        figures = Utilization(job.trainer, ["rollout-0"]).take()
        assert 0 < figures["engine/idle_share"] < 1
        assert 0 < figures["engine/requests"] <= figures["engine/episodes"] <= 4
    assert job.account()["matches"]


async def test_a_worker_without_the_newest_weights_takes_no_ticket_that_nobody_could_train(
    episodes: Episodes, processor: Processor, ring: Ring
) -> None:
    left_out, other = (Engine(processor, episodes.config) for _ in range(2))
    async with job_of(episodes, ring, left_out, other, max_staleness=1) as job:
        await job.offer(0)
        await job.until(lambda: left_out.version == other.version == 0)
        for version in (1, 2):
            await job.offer(version, workers=[1])
            await job.until(lambda: other.version == version)  # noqa: B023
        await job.until(lambda: "waiting for weights anew" in job.trainer.status_of("rollout-0"))
        job.open(limit=3)
        await job.until(lambda: job.pools[1].written == 6)
        assert job.pools[0].finished == 0
        await job.offer(3)
        await job.until(lambda: left_out.version == 3)
        other.holds = lambda answered: True
        job.trainer.set_limit(8)
        await job.until(lambda: job.pools[0].written)
    assert job.account()["matches"]


async def test_a_slow_worker_leaves_the_work_to_a_fast_one(
    episodes: Episodes, processor: Processor, ring: Ring
) -> None:
    fast, slow = (Engine(processor, episodes.config) for _ in range(2))
    slow.holds = lambda answered: True
    async with job_of(episodes, ring, fast, slow, groups_in_flight=2) as job:
        await job.offer(0)
        await job.until(lambda: fast.version == slow.version == 0)
        job.open(limit=8)
        await job.until(lambda: job.pools[0].written == 12 and slow.asking == 4)
        assert job.trainer.free_positions() == 0
        assert job.pools[1].written == 0
    assert job.account()["matches"]


async def test_no_worker_takes_all_tickets_at_one_look(episodes: Episodes, processor: Processor, ring: Ring) -> None:
    engines = [Engine(processor, episodes.config) for _ in range(2)]
    for engine in engines:
        engine.holds = lambda answered: True
    async with job_of(episodes, ring, *engines) as job:
        await job.offer(0)
        await job.until(lambda: all(engine.version == 0 for engine in engines))
        job.open(limit=4)  # as many as one worker has room for
        await job.until(lambda: not job.trainer.free_positions())
        assert all(pool._groups for pool in job.pools)
    assert job.account()["matches"]


async def test_an_episode_that_its_engine_failed_is_tried_again(
    episodes: Episodes, processor: Processor, ring: Ring
) -> None:
    engine = Engine(processor, episodes.config)
    engine.failures = 1
    async with job_of(episodes, ring, engine) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: job.pools[0].written == 2)
        job.source.poll(0)
        assert job.accounting.dropped == {"all_succeeded": 2}  # both have succeeded
    account = job.account()
    assert (account["finished"], account["matches"]) == (2, True)


@pytest.mark.parametrize("stepping", ["free", "lockstep"])
async def test_a_browser_acts_while_others_generate_unless_they_go_in_step(
    episodes: Episodes, processor: Processor, ring: Ring, stepping: str
) -> None:
    engine = Engine(processor, episodes.config)
    held: list[int] = []

    def hold_first(answered: int) -> bool:
        held.append(answered)
        return len(held) == 1

    engine.holds = hold_first
    async with job_of(episodes, ring, engine, stepping=stepping) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: engine.answered.total() >= (2 if stepping == "free" else 1))
        if stepping == "lockstep":
            assert engine.answered.total() == 1
            assert held == [0, 0]  # nobody has asked for a second answer
        engine.released.set()
        await job.until(lambda: job.pools[0].written == 2)
    assert engine.answered.total() == 4
    assert job.account()["matches"]


async def test_a_worker_waits_for_the_weights_of_a_trainer_that_started_again_and_runs_its_tickets(
    episodes: Episodes, processor: Processor, ring: Ring
) -> None:
    engine = Engine(processor, episodes.config)
    async with job_of(episodes, ring, engine) as job:
        await job.offer(3)
        job.open(limit=1)
        await job.until(lambda: job.pools[0].written == 2)
        job.trainer.put("weights/trainer", 2)
        fence = job.trainer.fence()
        job.trainer.open_job(Start(1, 2, fence + 1, (0,), 1), limit=fence + 3)
        announced = lambda: job.trainer.value("engine/rollout-0")["trainer"] == 2  # type: ignore[index]  # noqa: E731
        await job.until(lambda: announced() and "weights anew" in job.trainer.status_of("rollout-0"))
        assert (fence, job.trainer.taken()) == (1, 2)
        await job.offer(2)
        await job.until(lambda: job.pools[0].written == 6)
        made = [decode(ring.read(number)) for number in ring.committed()]
        assert Counter((each.ticket, each.incarnation) for each in made) == {(0, 0): 2, (0, 1): 2, (1, 1): 2}
