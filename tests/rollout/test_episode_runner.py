"""Episodes of a worker with browser servers of its own and of others, and the end of the job while it starts."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config, ModelConfig, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import tasks_config
from megatron_webrl.control.client import TicketClaim
from megatron_webrl.control.connection import JobEnded
from megatron_webrl.judge.budget import LocalMeter
from megatron_webrl.launch.roles import role_command
from megatron_webrl.launch.run_folder import write_job
from megatron_webrl.model.processor import Processor
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.rollout import main
from megatron_webrl.rollout.demonstrations import ScriptedGenerator
from megatron_webrl.rollout.episode_runner import EpisodeRunner
from megatron_webrl.types import TaskReference, Trajectory
from tests.browser.server.servers import config_for, server_processes
from tests.job_control import connect, control_service
from tests.judge.support import serving
from tests.rollout.teacher.test_teacher import reply, teacher
from tests.waiting import started, until


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path, shared_browsers: BrowserConfig) -> Config:
    run, model = RunConfig(directory=str(tmp_path)), ModelConfig(path=str(tiny_model))
    config = replace(config_for(), run=run, model=model, browser=shared_browsers)
    config.tasks = tasks_config(environments=["click-test"], max_steps=3)
    config.rollout = replace(config.rollout, groups_in_flight=1, group_size=2, max_new_tokens=64, max_model_len=4096)
    return config


def drawn(episodes: EpisodeRunner, ticket: int) -> TicketClaim:
    task = episodes.task_source.training_task(episodes.config.run.seed, ticket)
    return TicketClaim(ticket, TaskReference.of(task), 0)


async def play(config: Config, tickets: range) -> list[Trajectory]:
    """A scripted episode of each ticket."""
    processor = Processor.load(config.model.path)
    generator = ScriptedGenerator(processor, config.rollout)
    async with EpisodeRunner.open(config, processor, "rollout-0", LocalMeter(config.judge.budget)) as episodes:
        return [await episodes.run_try(generator, episodes.new_try(drawn(episodes, t), 0)) for t in tickets]


async def test_other_servers_give_the_same_episodes_as_local_ones(config: Config) -> None:
    others, before = await play(config, range(2)), server_processes()
    own = await play(replace(config, browser=config_for().browser), range(2))
    assert [path.name for path in (config.run_folder / "logs").iterdir()] == ["rollout-0-browsers-0.log"]
    assert server_processes() == before
    with pytest.raises(ConfigError, match=r"has browser.marks=False instead of True"):
        await play(replace(config, browser=replace(config.browser, marks=True)), range(1))
    assert [each.outcome for each in others] == ["success"] * 2
    for one, other in zip(own, others, strict=True):
        assert (one.task, one.instruction, one.images) == (other.task, other.instruction, other.images)
        assert [step.action for step in one.steps] == [step.action for step in other.steps]


async def test_a_training_episode_is_scored_by_the_teacher_after_its_verdict(
    config: Config, processor: Processor
) -> None:
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


@pytest.mark.slow  # a worker with all its imports
def test_the_end_of_the_job_ends_a_worker_whose_engine_starts(tmp_path: Path, tiny_model: Path) -> None:
    config = parse_config(
        None, [f"model.path={tiny_model}", "model.platform=cpu", f"run.directory={tmp_path}", "run.name=here"]
    )
    config.run_folder.mkdir()
    write_job(config, place_processes(config))
    with control_service(config.run_folder) as address:
        control, log = connect(address, "trainer-0"), tmp_path / "log"
        command = role_command(config.run_folder, "rollout-0", "--weights-only")
        with log.open("wb") as file, started(command, stderr=file) as worker:
            until(lambda: control.status_of("rollout-0") == "starting the engine", log.read_text, 60)
            control.end_job("finished")
            assert worker.wait(60) == 0, log.read_text()
        assert "engine started" not in log.read_text()
