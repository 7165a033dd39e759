"""Sampler states and their log through a real control service."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobEnded, JobFailed
from megatron_webrl.tasks.sampler import states as states_module
from megatron_webrl.tasks.sampler.knowledge import BLOCK, PASS, SamplerLog
from megatron_webrl.tasks.sampler.states import SamplerPublisher, SamplerState, SamplerStateReader, read_published
from megatron_webrl.tasks.sampler.task_files import TEST_FILE, TRAIN_FILE, FileDigest
from tests.job_control import connect, control_service

FIRST, SECOND, THIRD = SamplerState(0, 0, 0), SamplerState(8, 2, 0), SamplerState(13, 3, 1)


@pytest.fixture
def address(tmp_path: Path) -> Iterator[Path]:
    with control_service(tmp_path) as address:
        yield address


def reader(address: Path, role: str = "rollout-0") -> SamplerStateReader:
    return SamplerStateReader(connect(address, role), 60)


def numbered_keys(control: ControlClient, end: int = 100) -> list[int]:
    return [number for number in range(end) if control.get_json(f"sampler/{number}") is not None]


async def rates_at(worker: SamplerStateReader, *tickets: int) -> list[float | None]:
    return [(await worker.knowledge(ticket)).pass_rate("a") for ticket in tickets]


async def test_a_worker_knows_of_each_ticket_exactly_what_was_learned_before(address: Path) -> None:
    log, publisher, worker = SamplerLog(), SamplerPublisher(connect(address, "trainer-0")), reader(address)
    publisher.publish(log, [FIRST])
    assert await rates_at(worker, 0, 5, 7) == [None] * 3
    log.append(PASS, "a", [1 / 3, 1])
    log.append(BLOCK, "shop.example", 12.5)
    publisher.publish(log, [FIRST, SECOND])
    log.append(PASS, "a", [0.9, 2])
    log.append(PASS, "a", [0.1, 3])  # published already, known to no state
    publisher.publish(log, [FIRST, SECOND, THIRD])
    for each in (worker, reader(address)):
        assert await rates_at(each, 7, 8, 12, 13, 10**6) == [None, 1 / 3, 1 / 3, 0.9, 0.9]
        knowledge = await each.knowledge(14)
        assert (knowledge.groups("a"), knowledge.version, knowledge.blocked) == (2, 1, {"shop.example"})
        assert await each.knowledge(99) is knowledge


async def test_a_worker_with_another_task_file_ends_the_job(address: Path) -> None:
    trainer = connect(address, "trainer-0")
    files = {TRAIN_FILE: FileDigest("/data/train.jsonl", "aa"), TEST_FILE: FileDigest("test.jsonl", "bb")}
    SamplerPublisher(trainer, files).publish(SamplerLog(), [FIRST])
    same = {TRAIN_FILE: FileDigest("/copy/train.jsonl", "aa")}
    await SamplerStateReader(connect(address, "rollout-0"), 60, files=same).knowledge(0)
    other = files | {TRAIN_FILE: FileDigest("/data/train.jsonl", "cc")}
    with pytest.raises(JobFailed) as caught:
        await SamplerStateReader(connect(address, "rollout-3"), 60, files=other, node=1).knowledge(0)
    assert str(caught.value) == (
        "tasks.train_file=/data/train.jsonl of rollout-3 on node 1 has the digest cc, but /data/train.jsonl of "
        "trainer-0 on node 0 has aa; copy one file to all nodes"
    )
    assert trainer.job_end() == {"outcome": f"failed: {caught.value}", "role": "rollout-3"}


async def test_a_small_chunk_grows_until_it_is_full(address: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states_module, "CHUNK_ENTRIES", 4)
    control, log, worker = connect(address, "trainer-0"), SamplerLog(), reader(address)
    publisher = SamplerPublisher(control)
    for count in range(11):
        publisher.publish(log, [SamplerState(count, log.end, 0)])
        assert await rates_at(worker, count) == [count / 16 if count else None]
        log.append(PASS, "a", [(count + 1) / 16, 1])
    assert len(numbered_keys(control)) == 3
    assert control.get_json("sampler/index")["chunks"][0][1:] == [0, 4]
    for number in range(9):
        log.append(PASS, f"unit {number}", [0.5, 1])
    publisher.publish(log, [SamplerState(11, log.end, 0)])
    assert (await worker.knowledge(11)).pass_rate("unit 8") == 0.5
    assert await rates_at(reader(address), 11) == [11 / 16]


async def test_a_folded_log_replaces_its_keys_and_reaches_early_and_late_workers(
    address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_module, "CHUNK_ENTRIES", 4)
    control, log, early, asleep = connect(address, "trainer-0"), SamplerLog(), reader(address), reader(address)
    publisher = SamplerPublisher(control)
    for number in range(6):
        log.append(PASS, f"unit {number}", [number / 8, 1])
    publisher.publish(log, [SamplerState(0, 6, 0)])
    assert (await early.knowledge(0)).pass_rate("unit 5") == (await asleep.knowledge(0)).pass_rate("unit 5") == 5 / 8
    keys = numbered_keys(control)
    log.append(PASS, "unit 5", [0.0, 2])
    log.append(PASS, "unit 6", None)
    log.fold(7)
    publisher.publish(log, [SamplerState(4, 7, 0), SamplerState(9, 8, 0)])
    assert not set(keys) & set(numbered_keys(control))
    for worker in (early, asleep, reader(address)):
        assert [(await worker.knowledge(ticket)).pass_rate("unit 5") for ticket in (0, 4, 9)] == [0.0] * 3
        assert [(await worker.knowledge(4)).pass_rate(f"unit {number}") for number in range(5)] == [
            number / 8 for number in range(5)
        ]
    published, states = read_published(control)
    assert (published.base, published.end, len(published.entries), len(states)) == (7, 8, 1, 2)


async def test_a_restarted_trainer_may_publish_older_states_than_a_worker_remembers(address: Path) -> None:
    control, log, worker = connect(address, "trainer-0"), SamplerLog(), reader(address)
    for number in range(6):
        log.append(PASS, "a", [number / 8, number + 1])
    stored = SamplerLog.from_json(log.to_json())
    log.fold(6)
    SamplerPublisher(control).publish(log, [SamplerState(20, 6, 2)])
    assert await rates_at(worker, 20) == [5 / 8]
    SamplerPublisher(control).publish(stored, [SamplerState(10, 3, 1), SamplerState(20, 6, 2)])
    assert await rates_at(worker, 20, 12, 20) == [5 / 8, 2 / 8, 5 / 8]
    assert len(numbered_keys(control)) == 1


async def test_a_closed_ticket_gets_the_oldest_state(address: Path) -> None:
    log, publisher, worker = SamplerLog(), SamplerPublisher(connect(address, "trainer-0")), reader(address)
    log.append(PASS, "a", [0.5, 1])
    publisher.publish(log, [SECOND := SamplerState(8, 1, 0)])
    assert await rates_at(worker, 3) == [0.5]
    assert (await worker.knowledge(3)).learned == SECOND.learned


async def test_a_worker_waits_for_the_first_state(address: Path) -> None:
    trainer, worker = connect(address, "trainer-0"), reader(address)
    asked = asyncio.create_task(worker.knowledge(2))
    await asyncio.sleep(0)
    assert not asked.done()
    SamplerPublisher(trainer).publish(SamplerLog(), [FIRST])
    assert (await asked).learned == 0


async def test_a_missing_state_is_an_error_that_names_the_ticket(address: Path) -> None:
    worker = SamplerStateReader(connect(address, "rollout-3"), 0.2)
    message = r"rollout-3 waited 0 s \(run.startup_timeout_seconds\) for the sampler state of ticket 5 from trainer-0"
    with pytest.raises(JobFailed, match=message):
        await worker.knowledge(5)


async def test_the_end_of_the_job_ends_the_wait(address: Path) -> None:
    control = connect(address, "rollout-0")
    control.end_job("stopped")
    with pytest.raises(JobEnded):
        await SamplerStateReader(control, 60).knowledge(5)


async def test_a_large_log_is_published_in_keys_of_less_than_a_mebibyte(address: Path) -> None:
    log, worker = SamplerLog(), SamplerStateReader.from_config(Config(), connect(address, "rollout-0"))
    for number in range(30_000):
        log.append(PASS, f"{number:016x}", [1 / (number + 1), 1])
    log.fold(29_000)
    control = connect(address, "trainer-0")
    SamplerPublisher(control).publish(log, [SamplerState(0, 29_500, 0)])
    sizes = [len(json.dumps(control.get_json(f"sampler/{number}"))) for number in numbered_keys(control)]
    assert len(sizes) == 9
    assert 2**17 < max(sizes) < 2**20
    knowledge = await worker.knowledge(0)
    assert knowledge.pass_rate(f"{28_999:016x}") == 1 / 29_000
    assert knowledge.pass_rate(f"{29_499:016x}") == 1 / 29_500
    assert knowledge.pass_rate(f"{29_500:016x}") is None
