"""The pool with real tickets, ring and browsers, weights offered as by a trainer, and a scripted engine."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.control.state import TICKETS
from megatron_webrl.judge.budget import BudgetSpent, LocalMeter
from megatron_webrl.model.processor import Processor
from megatron_webrl.ring.record import decode_trajectory
from megatron_webrl.ring.ring import Ring
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.track import evaluations
from megatron_webrl.track.evaluations import EvaluationRequest
from megatron_webrl.trainer.telemetry import EngineUtilization
from megatron_webrl.types import BUDGET_SPENT
from tests.job_control import control_service
from tests.rollout.held_evaluator import HeldEvaluator
from tests.rollout.pool_jobs import DelayedEngine, Place, job_of
from tests.rollout.watched_rollouts import check_waiting_rollouts

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def episodes(
    processor: Processor, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EpisodeRunner]:
    """Browsers and tasks for all tests, with two steps each."""
    config = Config(
        run=RunConfig(directory=str(tmp_path_factory.mktemp("run"))),
        model=ModelConfig(path=str(tiny_model)),
        tasks=tasks_config(environments=["enter-text"], max_steps=3),
    )
    config.rollout = replace(config.rollout, group_size=2, groups_in_flight=4, max_model_len=4096, max_new_tokens=64)
    config.rollout.operation_timeout_seconds = 30
    config.browser.width, config.browser.height, config.browser.screenshot = 160, 210, "png"
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


async def test_in_mode_async_weights_change_in_flight_and_groups_that_get_too_old_are_aborted(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engine = DelayedEngine(processor, episodes.config)
    engine.delays = lambda answered: answered == 1  # the second step of every episode
    async with job_of(episodes, place, engine, max_staleness=1) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: engine.asking == 2 and sum(engine.answered.values()) == 2)
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


async def test_a_worker_waits_longer_than_a_trainer_that_waits_for_a_checkpoint(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    config = replace(episodes.config, run=replace(episodes.config.run, startup_timeout_seconds=4800.0))
    async with job_of(replace(episodes, config=config), place, DelayedEngine(processor, config)) as job:
        [pool] = job.pools
        assert pool.writer._timeout_seconds > config.checkpoint_timeout_seconds == 7200.0
        assert pool.weight_client._grace_seconds > 7200.0


async def test_with_fixed_weights_no_group_is_in_flight_when_they_change(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engine = DelayedEngine(processor, episodes.config)
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


async def test_groups_that_wait_for_verdicts_hold_neither_browsers_nor_tickets(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engine, evaluator = DelayedEngine(processor, episodes.config), HeldEvaluator()
    slow: Any = evaluator
    async with job_of(replace(episodes, evaluator=slow), place, engine, groups_in_flight=1) as job:
        await job.offer(0)
        job.open(limit=6)  # 12 episodes; the fixture has browsers for 8
        await job.until(lambda: evaluator.waiting == 12)
        assert job.pools[0]._status().endswith("0 groups running and 6 waiting for verdicts, 0 episodes done")
        assert job.pools[0].writer.written_episodes == 0
        evaluator.permitted.set()
        await job.until(lambda: job.pools[0].writer.written_episodes == 12)
    account = job.account()
    assert (account["matches"], account["finished"]) == (True, 12)


async def test_a_spent_budget_stops_the_job_and_loses_no_episode(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engine, evaluator = DelayedEngine(processor, episodes.config), HeldEvaluator(BudgetSpent("4 calls this hour"))
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


async def test_a_worker_with_outdated_weights_claims_no_ticket(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    left_out, other = (DelayedEngine(processor, episodes.config) for _ in range(2))
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


async def test_a_slow_worker_leaves_the_work_to_a_fast_one(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    fast, slow = (DelayedEngine(processor, episodes.config) for _ in range(2))
    slow.delays = lambda answered: True
    async with job_of(episodes, place, fast, slow, groups_in_flight=2) as job:
        await job.offer(0)
        await job.until(lambda: fast.version == slow.version == 0)
        job.open(limit=8)
        await job.until(lambda: job.pools[0].writer.written_episodes == 12 and slow.asking == 4)
        assert not job.has_free_tickets()
        assert job.pools[1].writer.written_episodes == 0
    assert job.account()["matches"]


async def test_no_worker_claims_all_tickets_in_one_poll(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engines = [DelayedEngine(processor, episodes.config) for _ in range(2)]
    for engine in engines:
        engine.delays = lambda answered: True
    async with job_of(episodes, place, *engines) as job:
        await job.offer(0)
        await job.until(lambda: all(engine.version == 0 for engine in engines))
        job.open(limit=4)  # the room of one worker
        await job.until(lambda: not job.has_free_tickets())
        assert {owner for _, owner in job.queue()["open"]} == {"rollout-0", "rollout-1"}
    assert job.account()["matches"]


async def test_an_episode_with_an_engine_error_is_retried(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engine = DelayedEngine(processor, episodes.config)
    engine.failures = 1
    async with job_of(episodes, place, engine) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: job.pools[0].writer.written_episodes == 2)
        job.source.poll(0)
        assert job.accounting.dropped == {"all_succeeded": 2}  # both have succeeded
    account = job.account()
    assert (account["finished"], account["matches"]) == (2, True)


@pytest.mark.parametrize("stepping", ["free", "lockstep"])
async def test_a_browser_acts_while_others_generate_except_in_lockstep(
    episodes: EpisodeRunner, processor: Processor, place: Place, stepping: str
) -> None:
    engine = DelayedEngine(processor, episodes.config)
    delayed: list[int] = []

    def delay_first(answered: int) -> bool:
        delayed.append(answered)
        return len(delayed) == 1

    engine.delays = delay_first
    async with job_of(episodes, place, engine, stepping=stepping) as job:
        await job.offer(0)
        job.open(limit=1)
        await job.until(lambda: engine.answered.total() >= (2 if stepping == "free" else 1))
        if stepping == "lockstep":
            assert (engine.answered.total(), delayed) == (1, [0, 0])  # no episode has requested a second response
            await check_waiting_rollouts(place[0], job.config.run_folder, job.until)
        engine.released.set()
        await job.until(lambda: job.pools[0].writer.written_episodes == 2)
    assert engine.answered.total() == 4
    assert job.account()["matches"]


async def test_a_worker_waits_for_the_weights_of_a_restarted_trainer_and_runs_its_tickets(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engine = DelayedEngine(processor, episodes.config)
    async with job_of(episodes, place, engine) as job:
        await job.offer(3)
        job.open(limit=1)
        await job.until(lambda: job.pools[0].writer.written_episodes == 2)
        await job.until(lambda: not job.queue()["open"])
        job.trainer.put_json("weights/trainer", 2)
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


async def test_the_tickets_of_groups_that_an_exclusive_evaluation_ends_can_be_claimed_again(
    episodes: EpisodeRunner, processor: Processor, place: Place
) -> None:
    engine = DelayedEngine(processor, episodes.config)
    engine.delays = lambda answered: True
    async with job_of(episodes, place, engine) as job:
        await job.offer(0)
        job.open(limit=2)
        await job.until(lambda: engine.asking == 4)
        assert len(job.queue()["open"]) == 2
        request = EvaluationRequest(1, "after", tasks=1, samples=1, temperature=0.0, version=0, exclusive=True)
        evaluations.submit_request(job.trainer, request)
        await job.until(lambda: not job.queue()["open"])
        claimed: list[int] = []  # a claim of the worker that waits may take them first, and returns them
        claim = lambda: claimed.extend(ticket for ticket, *_ in job.trainer.claim(TICKETS, "rollout-1.1", 2))  # noqa: E731
        await job.until(lambda: claim() or len(claimed) == 2)  # type: ignore[func-returns-value]
        assert sorted(claimed) == [0, 1]
        assert engine.asking <= 1  # of the evaluation
        engine.released.set()
