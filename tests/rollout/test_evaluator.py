"""Evaluation and training episodes of a worker: real Chromium and control service, a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_webrl.browser.server.client import RemoteSession
from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.control.client import ControlClient, TicketClaim
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.judge.budget import BudgetSpent, LocalMeter
from megatron_webrl.model.processor import Processor, decode_image
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.ring.segment import segment_name
from megatron_webrl.rollout import main
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.engine.vllm_engine import Sampling
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.evaluator import EvaluationGenerator, Evaluator, make_result
from megatron_webrl.rollout.generator import NO_LIMITS, Generation, ResponseLimits
from megatron_webrl.tasks.source import HELD_OUT_SEEDS
from megatron_webrl.track import evaluations
from megatron_webrl.track.episodes import EpisodeStore, record_files
from megatron_webrl.track.evaluations import EvaluationRequest, ResultCollector
from megatron_webrl.types import BUDGET_SPENT, FAULT_OUTCOMES, TaskReference, Trajectory
from tests.browser.server.servers import browser_of, config_for, server_processes
from tests.job_control import connect, control_service
from tests.judge.support import serving
from tests.rollout.teacher.test_teacher import reply, teacher
from tests.rollout.test_pool import HeldEvaluator
from tests.trajectories import trajectory
from tests.waiting import eventually

LIMIT = 120.0


class ScriptedEngine:
    """An engine for Evaluator whose responses come from the tasks' scripts; kills Chromium before the first ones."""

    def __init__(self, config: Config, processor: Processor, crashes: int = 0) -> None:
        self.version, self.partially_updated, self.crashes = 2, False, crashes
        self.samplings: list[Sampling] = []
        self.screenshots: list[bytes] = []
        self.released = asyncio.Event()
        self.released.set()
        self._script = ScriptedGenerator(processor, config.rollout)

    async def generate(
        self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes], sampling: Sampling,
        limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        if len(self.samplings) < self.crashes:
            [server] = server_processes()
            browser_of(server).kill()
        self.samplings.append(sampling)
        self.screenshots += images
        await self.released.wait()
        generation = await self._script.generate(session, token_ids, images)
        return replace(generation, versions=np.full_like(generation.versions, self.version))


@pytest.fixture
def control(tmp_path: Path) -> Iterator[ControlClient]:
    with control_service(tmp_path) as address:
        yield connect(address, "rollout-0")


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, shared_browsers: BrowserConfig, monkeypatch: pytest.MonkeyPatch) -> Config:
    run, model = RunConfig(directory=str(tmp_path)), ModelConfig(path=str(tiny_model))
    config = replace(config_for(), run=run, model=model, browser=shared_browsers)
    config.tasks = tasks_config(environments=["click-test", "focus-text"], max_steps=3)
    config.rollout = replace(config.rollout, groups_in_flight=1, group_size=2, max_new_tokens=64, max_model_len=4096)
    monkeypatch.setattr("megatron_webrl.rollout.evaluator.EVALUATION_EPISODES", 1)
    config.evaluation.every = 1
    return config


async def test_a_worker_runs_held_out_tasks(config: Config, control: ControlClient, processor: Processor) -> None:
    assert control.register_instance() == 1
    engine: Any = ScriptedEngine(config, processor)
    async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes:
        store = EpisodeStore.of_worker(config, "rollout-0")
        evaluator = Evaluator(config, control, engine, episodes, store, "rollout-0.1")

        async def collect(request: EvaluationRequest) -> ResultCollector:
            evaluations.submit_request(control, request)
            collector = ResultCollector(control, request)

            def complete() -> bool:
                evaluator.poll()
                return collector.poll()

            await eventually(complete, LIMIT)
            return collector

        request = EvaluationRequest(1, "during", tasks=4, samples=1, temperature=0.5, version=1, top_p=0.9, top_k=20)
        collector = await collect(request)
        results = [collector.results[episode] for episode in range(4)]
        assert [r.outcome for r in results] == ["success"] * 4
        assert [r.environment for r in results] == ["click-test", "focus-text"] * 2
        await eventually(lambda: len(record_files(store.folder)) == 4, LIMIT)
        assert [r.task for r in results] == [episodes.task_source.held_out_task(index).id for index in range(4)]
        assert str(HELD_OUT_SEEDS.start) in results[0].task
        assert [r.versions for r in results] == [(2, 2)] * 4
        assert all(r.steps >= 1 and r.response_tokens > 0 and r.worker == "rollout-0.1" for r in results)
        assert set(engine.samplings) == {(0.5, 0.9, 20)}
        assert not evaluator.exclusive

        # An exclusive evaluation begins when the engine has its version; only the images are blank.
        sizes = {decode_image(image).size for image in engine.screenshots}
        seen = len(engine.screenshots)
        alone = EvaluationRequest(
            2, "after", tasks=2, samples=1, temperature=0.0, version=3, exclusive=True, variant="blank_images"
        )
        evaluations.submit_request(control, alone)
        idle = ", evaluation after_blank_images: 0 episodes running"
        await eventually(lambda: (evaluator.poll(), evaluator.status() == idle)[1], LIMIT)
        assert evaluator.exclusive
        engine.version = 3
        collector = await collect(alone)
        assert [r.versions for r in collector.results.values()] == [(3, 3)] * 2
        blank = [decode_image(image) for image in engine.screenshots[seen:]]
        assert {image.size for image in blank} == sizes
        assert all(image.getextrema() == ((255, 255),) * 3 for image in blank)

        # A withdrawn request cancels its episodes and releases their browsers for the next one.
        engine.released.clear()
        requests = len(engine.samplings)
        evaluations.submit_request(
            control, EvaluationRequest(3, "during", tasks=2, samples=1, temperature=0.0, version=3)
        )
        await eventually(lambda: (evaluator.poll(), len(engine.samplings) > requests)[1], LIMIT)
        evaluations.withdraw_request(control)
        evaluator.poll()
        assert evaluator.status() == ""
        engine.released.set()
        collector = await collect(EvaluationRequest(4, "during", tasks=2, samples=1, temperature=0.0, version=3))
        assert [r.outcome for r in collector.results.values()] == ["success"] * 2
        await evaluator.close()


async def test_an_episode_that_a_browser_crash_ends_is_retried(config: Config, processor: Processor) -> None:
    request = EvaluationRequest(1, "during", tasks=1, samples=1, temperature=0.5, version=1)
    async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes:

        async def outcome(crashes: int) -> tuple[str, int]:
            engine: Any = ScriptedEngine(config, processor, crashes)
            found = await episodes.run_held_out(EvaluationGenerator(engine, request), request, 0)
            return found.outcome, found.tries

        assert await outcome(crashes=1) == ("success", 2)
        last, tries = await outcome(crashes=2)
        assert (last in FAULT_OUTCOMES, tries) == (True, 2)


def test_a_result_counts_the_requests_of_its_episode_that_no_recording_answered() -> None:
    played = trajectory(steps=2)
    last = replace(played.steps[-1], not_recorded_requests=3)  # each step has the count of the episode so far
    found = make_result(replace(played, steps=(replace(last, not_recorded_requests=1), last)), 1.0)
    assert found.not_recorded_requests == 3


async def test_a_spent_budget_ends_the_job(config: Config, control: ControlClient, processor: Processor) -> None:
    spent = HeldEvaluator(BudgetSpent("5 calls this hour"))
    engine: Any = ScriptedEngine(config, processor)
    verdicts: Any = spent
    async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes:
        store = EpisodeStore.of_worker(config, "rollout-0")
        evaluator = Evaluator(config, control, engine, replace(episodes, evaluator=verdicts), store, "rollout-0.1")
        request = EvaluationRequest(1, "during", tasks=4, samples=1, temperature=0.5, version=1, top_p=0.9, top_k=20)
        evaluations.submit_request(control, request)
        collector = ResultCollector(control, request)
        spent.permitted.set()

        def stopped() -> bool:
            evaluator.poll()
            return control.stop_requested()

        await eventually(stopped, LIMIT)
        assert control.requested_outcome() == BUDGET_SPENT
        for _ in range(3):
            evaluator.poll()
        assert not collector.poll()
        assert (collector.missing_count, spent.waiting) == (4, 1)  # no episode was claimed after that
        await evaluator.close()


def drawn(episodes: EpisodeRunner, ticket: int) -> TicketClaim:
    task = episodes.task_source.training_task(episodes.config.run.seed, ticket)
    return TicketClaim(ticket, TaskReference.of(task), 0)


async def play(config: Config, tickets: range) -> list[Trajectory]:
    processor = Processor.load(config.model.path)
    generator = ScriptedGenerator(processor, config.rollout)
    async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes:
        return [await episodes.run_try(generator, episodes.new_try(drawn(episodes, t), 0)) for t in tickets]


async def test_other_servers_give_the_same_episodes_as_local_ones(config: Config) -> None:
    others, before = await play(config, range(2)), server_processes()
    own = await play(replace(config, browser=config_for().browser), range(2))
    assert [path.name for path in (config.run_folder / "logs").iterdir()] == ["rollout-0-browsers-0.log"]
    assert server_processes() == before
    assert [each.outcome for each in others] == ["success"] * 2
    for one, other in zip(own, others, strict=True):
        assert (one.task, one.instruction, one.images) == (other.task, other.instruction, other.images)
        assert [step.action for step in one.steps] == [step.action for step in other.steps]


async def test_an_episode_is_scored_by_the_teacher_after_its_verdict(config: Config, processor: Processor) -> None:
    generator = ScriptedGenerator(processor, config.rollout)

    async def handle(request: web.Request) -> web.Response:
        (image,) = (body := await request.json())["content_parts"]
        assert image["url"].startswith("data:image/")
        tokens = np.array(body["token_ids"], np.int32)
        shown = processor.grids([base64.b64decode(image["url"].partition(",")[2])])
        return reply(body | {"token_ids": processor.expand_image_tokens(tokens, shown).tolist()})

    config.trainer.distillation.coefficient = 1.0
    config.trainer.distillation.url = "http://127.0.0.1:1"  # without it browser servers refuse the configuration
    async with (
        serving(handle) as url,
        teacher(url, processor) as scorer,
        EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes,
    ):
        assert episodes.teacher is None  # opened as it is here, it runs no training episodes
        trains = replace(episodes, teacher=scorer)
        tries = [trains.new_try(drawn(episodes, 0), 0) for _ in range(2)]
        found = await trains.run_try(generator, tries[0])
        failed = await trains.run_try(generator, tries[1], lambda: setattr(scorer, "_seconds", 0.0))  # no time
    assert found.outcome == "success"
    for step in found.steps:
        first = len(step.prompt_token_ids)
        assert step.teacher_logprobs.tolist() == [-float(first + n) for n in range(len(step.response_token_ids))]
    assert (failed.outcome, failed.reward) == ("teacher_error", 0.0)
    assert failed.verdict is not None
    assert failed.verdict.outcome == "success"


async def test_the_end_of_the_job_ends_what_a_worker_waits_for(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        control = connect(address, "rollout-0")
        short, long = (asyncio.create_task(asyncio.sleep(seconds, "done")) for seconds in (0, 3600))
        assert await main.unless_job_ends(control, short) == "done"
        connect(address, "trainer-0").end_job("finished")
        with pytest.raises(JobEnded):
            await asyncio.wait_for(main.unless_job_ends(control, long), 60)
        long.cancel()
        control.close()


def test_a_worker_whose_job_ends_while_it_starts_has_finished_nothing(tmp_path: Path) -> None:
    config = Config()
    config.run.name, config.ring.capacity_mib = f"starting{os.getpid()}", 1
    with control_service(tmp_path) as address:
        trainer = connect(address, "trainer-0")
        trainer.end_job("finished")
        ring = NodeRing(0, segment_name(config.run.name, "node 0"), "job")
        with pytest.raises(JobEnded):
            main.run(config, connect(address, "rollout-0"), 0, ring, nodes=(0, 1))  # it waits for a follower
        counts = {"instance_id": "rollout-0.1", "finished": 0, "unwritten": 0}
        assert trainer.get_json("final_counts/rollout-0") == counts
    assert not Path("/dev/shm", ring.name).exists()


async def test_an_engine_with_incomplete_weights_leaves_claimed_episodes_to_others(
    config: Config, control: ControlClient, processor: Processor
) -> None:
    engine: Any = ScriptedEngine(config, processor)
    async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes:
        store = EpisodeStore.of_worker(config, "rollout-0")
        evaluator = Evaluator(config, control, engine, episodes, store, "rollout-0.1")
        request = EvaluationRequest(1, "during", tasks=1, samples=1, temperature=0.5, version=1)
        evaluations.submit_request(control, request)
        evaluator.poll()  # claims the episode in the background
        engine.partially_updated = True
        name = evaluations.queue_name(request)
        await eventually(lambda: control.run("read_queue", name)["claimed"])
        await eventually(lambda: (evaluator.poll(), control.claim(name, "rollout-1.1", 1))[1])
        assert not engine.samplings
        await evaluator.close()
