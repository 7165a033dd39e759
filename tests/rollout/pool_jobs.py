"""Jobs of pools for tests: real tickets, ring and browsers, weights offered as by a trainer, and a scripted engine."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.schema import Config
from megatron_webrl.control.state import TICKETS
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.generator import Generation, GenerationError
from megatron_webrl.rollout.pool import RolloutPool
from megatron_webrl.rollout.stepping import Lockstep
from megatron_webrl.track.episodes import EpisodeStore
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.data.group_source import GroupSource
from megatron_webrl.types import TaskReference
from tests.job_control import connect

Place = tuple[Path, Ring]  # address file and ring of a job
LIMIT = 60.0  # seconds; CI machines are slow


class DelayedEngine:
    """Scripted responses with tokens of its version; delays or fails them on the test's request."""

    def __init__(self, processor: Processor, config: Config) -> None:
        self.version, self.partially_updated, self.rank_hosts = -1, False, ["here"]
        self.answered: Counter[RemoteSession] = Counter()
        self.delays: Callable[[int], bool] = lambda answered: False
        self.failures = 0  # answers that are still to fail
        self.asking = 0
        self.seen: list[tuple[int, int]] = []  # version taken, requests under way then
        self._script = ScriptedGenerator(processor, config.rollout)
        self.released = asyncio.Event()
        self.features = {"cuda_graphs": False, "async_scheduling": False}

    async def generate(self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes]) -> Generation:
        self.asking += 1
        try:
            if self.delays(self.answered[session]):
                await self.released.wait()
            if self.failures:
                self.failures -= 1
                raise GenerationError("the engine does not feel like it")
            answer = await self._script.generate(session, token_ids, images)
        finally:
            self.asking -= 1
        self.answered[session] += 1
        return replace(answer, versions=np.full(len(answer.response_token_ids), self.version, np.int32))

    def check_alive(self) -> None: ...

    async def join_weight_link(self, *arguments: object) -> None: ...

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

    def has_free_tickets(self) -> bool:
        return bool(self.queue()["claimed"] < self.queue()["appended"])

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
        async with asyncio.timeout(LIMIT):
            while not condition():
                await asyncio.sleep(0.02)

    def account(self) -> dict[str, Any]:
        """The final accounting, as the trainer computes it."""
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
    if config.rollout.stepping == "lockstep":
        shared.agent = replace(shared.agent, lockstep=Lockstep(config.rollout.operation_timeout_seconds))
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
