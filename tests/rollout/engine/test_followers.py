"""An engine over two nodes: its worker, and its other part in a process of its own, meet through a control plane.

Both run on this machine, but share no memory beside it: vLLM talks over TCP between them, as between nodes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_webrl.cluster.placement import ring_name, rollout_process_name
from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient, JobFailed
from megatron_webrl.launch.role_process import RoleProcess
from megatron_webrl.ring.segment import segment_prefix, sweep_segments
from megatron_webrl.rollout.engine.engine_leader import EngineFollowers, failure_key, reply_key, start_key
from megatron_webrl.rollout.engine.errors import EngineDeadError
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from tests.planes import connect, control_plane
from tests.rollout.engine.test_vllm_engine import TOLERANCE, expected, picture, prompt, respond
from tests.weights.serving import Stage, changed_folders, configuration, load

PART = rollout_process_name(0, 1)


def spanning(folder: Path, model: Path) -> Config:
    """Two nodes, one engine of two pipeline stages, one stage on each."""
    config = configuration(folder, model, data_parallel=2)
    config.run.name = f"span-{os.getpid()}"
    config.cluster.nodes, config.rollout.pipeline_parallel = 2, 2
    config.rollout.max_new_tokens, config.ring.capacity_mib = 24, 8
    return config


@asynccontextmanager
async def part_on_another_node(stage: Stage) -> AsyncIterator[RoleProcess]:
    """`webrl rollout --follower`, which ends with the job, in good order."""
    arguments = ["--config", str(stage.path), "--control", f"{stage.host}:{stage.port}", "--node", "1", "--worker", "0"]
    command = [sys.executable, "-m", "megatron_webrl.cli", "rollout", *arguments, "--follower", "1"]
    role = RoleProcess.start(PART, command, dict(os.environ), stage.folder / "part.log")
    try:
        yield role
        stage.control.end_job("finished")
        assert await asyncio.to_thread(role.process.wait, 30) == 0, role.log.read_text()
    finally:
        if role.process.poll() is None:
            role.process.kill()
            role.process.wait()
        sweep_segments(segment_prefix(stage.config.run.name))


def rank_of(part: RoleProcess) -> psutil.Process:
    """vLLM's process of the part: the child of its child that computes."""
    (engine,) = psutil.Process(part.process.pid).children()
    return next(each for each in engine.children() if "resource_tracker" not in " ".join(each.cmdline()))


async def gap(engine: VLLMEngine, model: Path) -> float:
    """Largest difference of an answer's log-probabilities from those of transformers in one process."""
    answer = await respond(engine, prompt(engine, 1), [picture(0)])
    return float(np.abs(answer.logprobs - expected(load(model), engine, answer, [picture(0)])).max())


async def loss(parts: EngineFollowers) -> str:
    """Which part is lost and how, once one is, within a limit."""
    async with asyncio.timeout(300):
        while (lost := parts.failure()) is None:
            await asyncio.sleep(0.05)
    return lost


@asynccontextmanager
async def started(stage: Stage, control: ControlClient) -> AsyncIterator[tuple[VLLMEngine, EngineFollowers, str]]:
    """An engine of two parts in another life of its worker, and the life's name."""
    life = control.register_instance()
    parts = await EngineFollowers.start(stage.config, control, 0, life, (0, 1))
    engine = await VLLMEngine.start(stage.config, 0, life, parts)
    try:
        yield engine, parts, f"rollout-0.{life}"
    finally:
        await engine.close()


async def take(version: int, refresh: WeightClient, stage: Stage) -> None:
    async with asyncio.timeout(120):
        while refresh.engine.version < version:
            await refresh.poll()
            await stage.until(lambda: True, "the trainer's end")
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_an_engine_over_two_nodes_answers_takes_weights_ends_with_a_part_and_comes_back_with_whole_weights(
    tiny_model: Path, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, spanning(tmp_path, tiny_model))
    first, second = changed_folders(tmp_path, tiny_model, 2)
    control = stage.connect("rollout-0")
    try:
        async with part_on_another_node(stage) as role:
            async with started(stage, control) as (engine, parts, life):
                assert parts.hosts == (socket.gethostname(),) * 2
                assert await gap(engine, tiny_model) < TOLERANCE
                stage.start_trainer([first, second])
                refresh = WeightClient(stage.config, control, engine, 0, life)
                await take(0, refresh, stage)
                stage.control.put_json("go/1", True)
                await take(1, refresh, stage)
                assert await gap(engine, first) < TOLERANCE
                sums = await engine.weight_checksums()
                assert len(sums) == 2
                assert all(sums)  # of both parts' ranks, compared with the sender's (weights.verify)
                rank_of(role).kill()
                with pytest.raises(EngineDeadError, match=rf"{PART} on {socket.gethostname()} exited with code 1"):
                    await take(2, refresh, stage)
            assert role.process.poll() is None  # it waits for the worker's next life
            async with started(stage, control) as (engine, _, life):
                refresh = WeightClient(stage.config, control, engine, 0, life)
                await refresh.poll()  # it is announced
                stage.control.put_json("go/2", True)
                await take(2, refresh, stage)
                assert await gap(engine, second) < TOLERANCE
            stage.kill_trainer()
    finally:
        control.close()
        stage.close()


@pytest.mark.soak
async def test_an_engine_over_two_nodes_starts_again_as_a_whole_when_either_side_was_killed(
    tiny_model: Path, tmp_path: Path
) -> None:
    stage = Stage(tmp_path, spanning(tmp_path, tiny_model))
    control = stage.connect("rollout-0")
    try:
        async with part_on_another_node(stage) as role:
            for how in ("vLLM's rank", "the part", "the worker's vLLM", "nobody"):
                async with started(stage, control) as (engine, parts, _):
                    assert await gap(engine, tiny_model) < TOLERANCE, how
                    if how == "vLLM's rank":
                        rank_of(role).kill()
                    elif how == "the part":
                        role.process.kill()
                        role.process.wait()
                        control.clear_heartbeat(PART)
                        role.restart()
                    elif how == "the worker's vLLM":
                        for core in multiprocessing.active_children():
                            core.kill()
                    if how in ("vLLM's rank", "the part"):
                        assert PART in await loss(parts)
                        with pytest.raises(EngineDeadError, match=PART):
                            await engine.generate(None, prompt(engine, 0), [])
    finally:
        control.close()
        stage.close()


async def test_a_part_whose_ranks_do_not_start_says_why_waits_for_the_next_life_and_ends_with_the_job(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = spanning(tmp_path, tiny_model)
    config.model.path = str(tmp_path / "nowhere")
    stage = Stage(tmp_path, config)
    control = stage.connect("rollout-0")
    try:
        async with part_on_another_node(stage) as role:
            for life in (1, 2):
                parts = await EngineFollowers.start(config, control, 0, life, (0, 1))
                assert re.search(rf"{PART} on .* exited with code 1; last log line: .*nowhere", await loss(parts))
            assert segment_names(config) == [ring_name(config, 1)]  # for the trainer ranks of a node without a worker
            assert role.process.poll() is None
        assert segment_names(config) == []
    finally:
        stage.close()


def segment_names(config: Config) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(segment_prefix(config.run.name))]


async def test_a_worker_names_the_node_whose_part_does_not_answer(tiny_model: Path, tmp_path: Path) -> None:
    config = spanning(tmp_path, tiny_model)
    config.run.startup_timeout_seconds = 0.3
    with control_plane(tmp_path) as address:
        worker = connect(address, "rollout-0")
        with pytest.raises(
            EngineDeadError, match=r"0\.3 s \(run\.startup_timeout_seconds\) for rollout-0\.follower-1 on node 7"
        ):
            await EngineFollowers.start(config, worker, 0, 1, (3, 7))


async def test_each_life_of_an_engine_meets_at_a_port_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    config = spanning(tmp_path, tiny_model)
    with control_plane(tmp_path) as address:
        worker, part = connect(address, "rollout-0"), connect(address, PART)
        ports = []
        for life in (1, 2):
            calling = asyncio.create_task(EngineFollowers.start(config, worker, 0, life, (0, 1)))
            while (worker.get_json(start_key(0)) or {}).get("instance_number") != life:
                await asyncio.sleep(0.01)
            part.put_json(reply_key(0, life, 1), {"host": "far"})
            parts = await asyncio.wait_for(calling, 10)
            assert parts.rank_hosts(4) == [socket.gethostname()] * 2 + ["far"] * 2
            ports.append(parts.span.master_port)
        assert ports[0] != ports[1]


async def test_a_part_that_fails_or_falls_silent_ends_its_engine_by_name(tiny_model: Path, tmp_path: Path) -> None:
    config = spanning(tmp_path, tiny_model)
    with control_plane(tmp_path) as address:
        worker, part = connect(address, "rollout-0"), connect(address, PART)
        worker.heartbeat_timeout_seconds = 0.3
        part.put_json(reply_key(0, 1, 1), {"host": "far"})
        parts = await EngineFollowers.start(config, worker, 0, 1, (0, 4))
        assert parts.failure() is None
        part.put_json(failure_key(0, 1), how := f"{PART} on far was killed by SIGKILL")
        assert await loss(parts) == how
        part.put_json(reply_key(0, 2, 1), {"host": "far"})
        parts = await EngineFollowers.start(config, worker, 0, 2, (0, 4))
        part.store.set(f"heartbeat/{PART}", "1")
        assert (await loss(parts)).startswith(f"{PART} on node 4 (far) sent no heartbeat")


async def test_the_end_of_the_job_ends_the_wait_for_parts(tiny_model: Path, tmp_path: Path) -> None:
    config = spanning(tmp_path, tiny_model)
    with control_plane(tmp_path) as address:
        worker = connect(address, "rollout-0")
        calling = asyncio.create_task(EngineFollowers.start(config, worker, 0, 1, (0, 1)))
        await asyncio.sleep(0)
        connect(address, "other").end_job("failed: other things")
        with pytest.raises(JobFailed, match="other things"):
            await asyncio.wait_for(calling, 10)
