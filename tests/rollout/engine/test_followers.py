"""An engine over two nodes: a worker and a follower in a separate process, connected by a control service.

Both run on this machine, but share no other memory: vLLM communicates over TCP between them, as between nodes.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.child_process import SupervisedProcess
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.launch.roles import role_command
from megatron_webrl.placement.placement import place_processes, ring_name, rollout_process_name
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.ring.segment import segment_prefix, sweep_segments
from megatron_webrl.rollout.engine.followers import EngineFollowers, failure_key, reply_key, run, start_key
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.generator import EngineDeadError
from tests.job_control import connect, control_service
from tests.rollout.engine.engines import TOLERANCE, expected, picture, prompt, respond
from tests.waiting import eventually
from tests.weights.serving import Stage, changed_folders, configuration, load

FOLLOWER = rollout_process_name(0, 1)


def spanning(folder: Path, model: Path) -> Config:
    """Two nodes and one engine with two pipeline stages, one on each node."""
    config = configuration(folder, model, data_parallel=2)
    config.run.name = f"span-{os.getpid()}"
    config.cluster.nodes, config.rollout.pipeline_parallel = 2, 2
    config.rollout.max_new_tokens, config.ring.capacity_mib = 24, 8
    return config


@asynccontextmanager
async def follower_process(stage: Stage) -> AsyncIterator[SupervisedProcess]:
    """`webrl role rollout-0.follower-1`, which must exit with 0 at the end of the job."""
    (stage.folder / "placement.json").write_text(json.dumps(place_processes(stage.config).to_json()))
    command = role_command(stage.folder, "rollout-0.follower-1")
    role = SupervisedProcess(FOLLOWER, command, dict(os.environ), stage.folder / "follower.log").start()
    try:
        yield role
        stage.control.end_job("finished")
        assert await asyncio.to_thread(role.process.wait, 30) == 0, role.log.read_text()
        assert segment_names(stage.config) == []
    finally:
        if role.process.poll() is None:
            role.process.kill()
            role.process.wait()
        sweep_segments(segment_prefix(stage.config.run.name))


def rank_of(follower: SupervisedProcess) -> psutil.Process:
    (engine,) = psutil.Process(follower.process.pid).children()
    return next(each for each in engine.children() if "resource_tracker" not in " ".join(each.cmdline()))


async def gap(engine: VLLMEngine, model: Path) -> float:
    """The largest difference of a response's log-probabilities from those of transformers."""
    answer = await respond(engine, prompt(engine, 1), [picture(0)])
    return float(np.abs(answer.logprobs - expected(load(model), engine, answer, [picture(0)])).max())


async def failure_of(followers: EngineFollowers) -> str:
    await eventually(followers.failure, 300)
    return str(followers.failure())


@asynccontextmanager
async def started(stage: Stage, control: ControlClient) -> AsyncIterator[tuple[VLLMEngine, EngineFollowers, str]]:
    """An engine on two nodes for a new instance of its worker, its followers, and the instance's name."""
    number = control.register_instance()
    followers = await EngineFollowers.start(stage.config, control, 0, number, (0, 1))
    engine = await VLLMEngine.start(stage.config, 0, number, followers)
    try:
        yield engine, followers, f"rollout-0.{number}"
    finally:
        await engine.close()


async def take(version: int, weights: WeightClient, stage: Stage) -> None:
    async with asyncio.timeout(120):
        while weights.engine.version < version:
            await weights.poll()
            await stage.until(lambda: True, "the trainer's end")
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.engine
async def test_an_engine_over_two_nodes_updates_fails_and_restarts(tiny_model: Path, tmp_path: Path) -> None:
    stage = Stage(tmp_path, spanning(tmp_path, tiny_model))
    first, second = changed_folders(tmp_path, tiny_model, 2)
    control = stage.connect("rollout-0")
    try:
        async with follower_process(stage) as role:
            async with started(stage, control) as (engine, followers, instance_id):
                assert followers.hosts == (socket.gethostname(),) * 2
                stage.start_trainer([first, second])
                weights = WeightClient(stage.config, control, engine, instance_id)
                await take(0, weights, stage)
                assert await gap(engine, tiny_model) < TOLERANCE
                stage.control.put_json("go/1", True)
                await take(1, weights, stage)
                assert await gap(engine, first) < TOLERANCE
                sums = await engine.weight_checksums()
                assert len(sums) == 2
                assert all(sums)  # of the ranks on both nodes, compared with the sender's (weights.verify)
                rank_of(role).kill()
                with pytest.raises(EngineDeadError, match=rf"{FOLLOWER} on {socket.gethostname()} exited with code 1"):
                    await take(2, weights, stage)
            assert role.process.poll() is None  # it waits for the worker's next start
            assert segment_names(stage.config) == [ring_name(stage.config, 1)]  # of a node without a worker
            async with started(stage, control) as (engine, _, instance_id):
                weights = WeightClient(stage.config, control, engine, instance_id)
                await weights.poll()  # announces the engine
                stage.control.put_json("go/2", True)
                await take(2, weights, stage)
                assert await gap(engine, second) < TOLERANCE
            stage.kill_trainer()
    finally:
        control.close()
        stage.close()


def segment_names(config: Config) -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(segment_prefix(config.run.name))]


async def test_each_start_has_a_new_port_and_names_a_failed_follower(tiny_model: Path, tmp_path: Path) -> None:
    config, ports, how = spanning(tmp_path, tiny_model), set[int](), f"{FOLLOWER} on far was killed by SIGKILL"
    with control_service(tmp_path, heartbeat_timeout_seconds=0.3) as address:
        worker, follower = connect(address, "rollout-0"), connect(address, FOLLOWER)
        for number in (1, 2):
            calling = asyncio.create_task(EngineFollowers.start(config, worker, 0, number, (0, 4)))
            await eventually(lambda: (worker.get_json(start_key(0)) or {}).get("instance_number") == number)  # noqa: B023
            follower.put_json(reply_key(0, number, 1), {"host": "far"})
            followers = await asyncio.wait_for(calling, 10)
            assert followers.rank_hosts(4) == [socket.gethostname()] * 2 + ["far"] * 2
            ports.add(followers.span.master_port)
            assert followers.failure() is None
            if number == 1:
                follower.put_json(failure_key(0, 1), how)
                assert await failure_of(followers) == how
        assert len(ports) == 2
        follower._connection.sync(make_fields=lambda: {"roles": {FOLLOWER: (0.0, {})}})  # its last heartbeat
        assert (await failure_of(followers)).startswith(f"{FOLLOWER} on node 4 (far) sent no heartbeat")


async def test_the_wait_for_followers_ends_at_its_limit_or_with_the_job(tiny_model: Path, tmp_path: Path) -> None:
    config = spanning(tmp_path, tiny_model)
    with control_service(tmp_path) as address:
        worker = connect(address, "rollout-0")
        calling = asyncio.create_task(EngineFollowers.start(config, worker, 0, 1, (0, 1)))
        config = spanning(tmp_path, tiny_model)
        config.run.startup_timeout_seconds = 0.3
        words = r"0\.3 s \(run\.startup_timeout_seconds\) for rollout-0\.follower-1 on node 7"
        with pytest.raises(EngineDeadError, match=words):
            await EngineFollowers.start(config, worker, 0, 2, (3, 7))
        connect(address, "other").end_job("failed: other things")
        with pytest.raises(JobFailed, match="other things"):
            await asyncio.wait_for(calling, 10)


async def test_a_restarted_follower_fails_a_start_that_it_has_answered_before(tiny_model: Path, tmp_path: Path) -> None:
    """The ranks of a start rendezvous once."""
    config = spanning(tmp_path, tiny_model)
    config.evaluation.only = True  # without a ring
    with control_service(tmp_path) as address:
        worker, restarted = connect(address, "rollout-0"), connect(address, FOLLOWER)
        start = {"instance_number": 1, "host": "127.0.0.1", "port": 9}
        reply = {"host": socket.gethostname(), "instance_number": restarted.register_instance()}
        worker.put_json(start_key(0), start)
        worker.put_json(reply_key(0, 1, 1), reply)
        serving = asyncio.create_task(
            asyncio.to_thread(run, config, restarted, 0, 1, 2, NodeRing(1, ring_name(config, 1), "job"))
        )
        await eventually(lambda: worker.get_json(failure_key(0, 1)) or serving.done())
        assert "was restarted" in str(worker.get_json(failure_key(0, 1)))
        worker.end_job("finished")
        with pytest.raises(JobEnded):
            await asyncio.wait_for(serving, 30)
