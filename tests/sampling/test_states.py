"""Sampler states through a real control plane."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import JobEnded, JobFailed
from megatron_webrl.sampling.states import SamplerState, SamplerStateReader, publish_states
from tests.planes import connect, control_plane

FIRST, SECOND, THIRD = SamplerState(0, (0.1, 0.9)), SamplerState(8, (1 / 3, 2 / 3)), SamplerState(13, (0.75, 0.25))


@pytest.fixture
def address(tmp_path: Path) -> Iterator[tuple[str, int]]:
    with control_plane(tmp_path) as address:
        yield address


async def test_a_worker_reads_the_exact_state_of_each_ticket(address: tuple[str, int]) -> None:
    trainer, worker = connect(address, "trainer-0"), SamplerStateReader(connect(address, "rollout-0"), 60)
    publish_states(trainer, [FIRST])
    assert [await worker.probabilities(ticket) for ticket in (0, 5, 7)] == [FIRST.probabilities] * 3
    publish_states(trainer, [FIRST, SECOND], [FIRST])
    publish_states(trainer, [FIRST, SECOND, THIRD], [FIRST, SECOND])
    probabilities = [await worker.probabilities(ticket) for ticket in (7, 8, 12, 13, 10**6)]
    expected = [FIRST, SECOND, SECOND, THIRD, THIRD]
    assert probabilities == [state.probabilities for state in expected]


async def test_old_states_are_deleted_and_their_closed_tickets_get_the_oldest_one(address: tuple[str, int]) -> None:
    trainer, control = connect(address, "trainer-0"), connect(address, "rollout-0")
    worker, late = SamplerStateReader(control, 60), SamplerStateReader(control, 60)
    publish_states(trainer, [FIRST, SECOND])
    assert await worker.probabilities(3) == FIRST.probabilities
    publish_states(trainer, [SECOND, THIRD], [FIRST, SECOND])
    assert control.get_json("sampler/0") is None
    assert await worker.probabilities(3) == await late.probabilities(3) == SECOND.probabilities
    assert await late.probabilities(14) == THIRD.probabilities


async def test_a_worker_waits_for_the_first_state(address: tuple[str, int]) -> None:
    trainer, worker = connect(address, "trainer-0"), SamplerStateReader(connect(address, "rollout-0"), 60)
    asked = asyncio.create_task(worker.probabilities(2))
    await asyncio.sleep(0)
    assert not asked.done()
    publish_states(trainer, [FIRST])
    assert await asked == FIRST.probabilities


async def test_a_missing_state_is_an_error_that_names_the_ticket(address: tuple[str, int]) -> None:
    worker = SamplerStateReader(connect(address, "rollout-3"), 0.2)
    message = r"rollout-3 waited 0 s \(run.startup_timeout_seconds\) for the sampler state of ticket 5 from trainer-0"
    with pytest.raises(JobFailed, match=message):
        await worker.probabilities(5)


async def test_the_end_of_the_job_ends_the_wait(address: tuple[str, int]) -> None:
    control = connect(address, "rollout-0")
    control.end_job("stopped")
    with pytest.raises(JobEnded):
        await SamplerStateReader(control, 60).probabilities(5)


def test_only_adaptive_samplers_have_states(address: tuple[str, int]) -> None:
    control, config = connect(address, "rollout-0"), Config()
    for name, has in (("uniform", False), ("ratio", False), ("curriculum", True), ("near_target", True)):
        config.tasks.sampler.name = name
        assert (SamplerStateReader.from_config(config, control) is not None) is has
