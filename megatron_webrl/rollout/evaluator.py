"""Evaluation episodes of a worker, concurrent with its groups; only results are stored, outside the ring."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_webrl.config.schema import EVALUATION_EPISODES, Config
from megatron_webrl.control.client import POLL_SECONDS, Claimer, ControlClient
from megatron_webrl.judge.budget import BudgetSpent, JobUsageMeter, request_stop_without_budget
from megatron_webrl.model.processor import decode_image
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.rollout.generator import NO_LIMITS, Generation, ResponseLimits, white_image
from megatron_webrl.track import evaluations
from megatron_webrl.track.episodes import EpisodeStore
from megatron_webrl.track.evaluations import BLANK_IMAGES, EvaluationRequest, EvaluationResult
from megatron_webrl.track.live_rollouts import RunningEpisodes
from megatron_webrl.types import Trajectory

if TYPE_CHECKING:
    from megatron_webrl.browser.server.client import RemoteSession

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationGenerator:
    """The engine with the sampling of a request, and with white images if it is blind. Implements Generator."""

    engine: VLLMEngine
    request: EvaluationRequest

    async def generate(
        self, session: RemoteSession, token_ids: np.ndarray, images: Sequence[bytes],
        limits: ResponseLimits = NO_LIMITS,
    ) -> Generation:  # fmt: skip
        blind = self.request.variant == BLANK_IMAGES
        shown = [white_image(*decode_image(data).size) for data in images] if blind else images
        sampling = self.request.temperature, self.request.top_p, self.request.top_k
        return await self.engine.generate(session, token_ids, shown, sampling, limits)


def make_result(trajectory: Trajectory, seconds: float) -> EvaluationResult:
    """The result of an evaluated episode that took `seconds`."""
    task, steps, verdict = trajectory.task, trajectory.steps, trajectory.verdict
    oldest, newest = trajectory.oldest_version, trajectory.newest_version
    return EvaluationResult(
        index=trajectory.ticket, sample=trajectory.index, task=task.id, source=task.part or task.source,
        environment=task.environment, difficulty=task.difficulty, outcome=trajectory.outcome, steps=len(steps),
        response_tokens=trajectory.response_tokens, seconds=seconds, worker=trajectory.worker,
        versions=None if oldest is None or newest is None else (oldest, newest),
        evaluator="" if verdict is None else verdict.protocol or verdict.evaluator,
        judge_dollars=0.0 if verdict is None else verdict.dollars,
        votes_differ=verdict.votes_differ if verdict is not None and verdict.votes else None,
        not_recorded_requests=steps[-1].not_recorded_requests if steps else 0,
    )  # fmt: skip


@dataclass
class Evaluator:
    """Runs episodes of the requested evaluation while there are unclaimed ones. Belongs to one event loop.

    When the judge's budget is spent it requests the end of the job and claims no more: the evaluation stays incomplete.
    """

    config: Config
    control: ControlClient
    engine: VLLMEngine
    episode_runner: EpisodeRunner
    store: EpisodeStore
    instance_id: str
    _request: EvaluationRequest | None = None
    _claimer: Claimer | None = None  # of episodes of the request
    _running: set[asyncio.Task[None]] = field(default_factory=set)
    _budget_spent: bool = False  # of the judge

    @property
    def exclusive(self) -> bool:
        """Whether an evaluation is requested during which nothing else may run."""
        return self._request is not None and self._request.exclusive

    def status(self) -> str:
        """Text for the status line; empty without an evaluation."""
        if self._request is None:
            return ""
        return f", evaluation {self._request.name}: {len(self._running)} episodes running"

    def poll(self) -> None:
        """Start episodes of the requested evaluation, cancel a finished one's. Never waits; raises episodes' errors."""
        for task in [task for task in self._running if task.done()]:
            self._running.remove(task)
            if not task.cancelled():
                task.result()
        request = evaluations.current_request(self.control)
        if request != self._request:
            for task in self._running:  # of a finished evaluation
                task.cancel()
            self._request, self._claimer = request, None
        if request is None or self._budget_spent or self.engine.partially_updated or self.engine.version < 0:
            if self._claimer is not None:
                self._claimer.put_back()
            return
        if request.exclusive and request.version != self.engine.version:
            return
        if self._claimer is None:
            self._claimer = Claimer(self.control, evaluations.queue_name(request), self.instance_id)
        for episode, *_ in self._claimer.poll(self._max_episodes - len(self._running)):
            self._running.add(asyncio.create_task(self._run(request, episode)))

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    @property
    def _max_episodes(self) -> int:
        rollout = self.config.rollout
        return rollout.groups_in_flight * rollout.group_size if self.exclusive else EVALUATION_EPISODES

    async def _run(self, request: EvaluationRequest, episode: int) -> None:
        generator = EvaluationGenerator(self.engine, request)
        started = time.monotonic()
        try:
            trajectory = await self.episode_runner.run_held_out(generator, request, episode)
        except BudgetSpent as error:  # it stays without a result
            if not self._budget_spent:
                request_stop_without_budget(self.control, error)
            self._budget_spent = True
        else:
            trajectory = replace(trajectory, worker=self.instance_id)
            result = make_result(trajectory, time.monotonic() - started)
            await asyncio.to_thread(evaluations.submit_result, self.control, request, result, episode)
            await asyncio.to_thread(self.store.add, [trajectory], request.name)
        finally:
            index, sample = request.task_and_sample(episode)
            self.episode_runner.live.close(request.name, index, sample)


async def run_evaluation_worker(config: Config, control: ControlClient, engine: VLLMEngine, instance_id: str) -> None:
    """Run episodes of requested evaluations until the job ends. Raises JobEnded or JobFailed."""
    meter = JobUsageMeter(control, config.judge.budget)
    async with EpisodeRunner.open(config, engine.processor, control.role, meter) as runner:
        store = EpisodeStore.of_worker(config, control.role)
        evaluator = Evaluator(config, control, engine, runner, store, instance_id)
        running_episodes = RunningEpisodes(config, control, runner.live)
        try:
            while True:
                control.check_job()
                request = evaluations.current_request(control)
                if request is not None and engine.version < 0:
                    await engine.serve_initial_weights(request.version)
                    # After that a failure of the worker is no configuration error: its supervisor restarts it.
                    control.put_json(f"weights/applied/{control.role}", {"version": request.version})
                evaluator.poll()
                running_episodes.poll()
                control.report_status(f"ready{evaluator.status()}")
                await asyncio.sleep(POLL_SECONDS)
        finally:
            await evaluator.close()
            await running_episodes.close()
            store.close()
