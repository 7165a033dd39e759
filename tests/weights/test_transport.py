"""Transfers between real processes over gloo: received values, memory, and the errors of faults on both sides."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_webrl.weights import transport
from megatron_webrl.weights.slices import Slice, TransferMessage
from tests import forks
from tests.weights.ranks import (
    MODEL,
    SENDERS,
    Case,
    Fault,
    Part,
    boxes,
    engine_rank,
    messages,
    silent_rank,
    slice_checksums,
    trainer_rank,
)

ENGINES = (1, 2)
CONTIGUOUS = {"stack": Part((4, 6), None, None, stacked=3), "large": MODEL["large"]}  # every slice, on both sides
SLACK = KILL_SECONDS = 15.0  # a busy machine may exceed a timeout by the first; silence of living ranks is shorter
NONE = Fault()
needs_gpu = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs a GPU")
Rank = tuple[str, int, int]  # "trainer" or "engine", which engine (0 for the trainer), rank


class Ranks:
    """Rank processes of a test and their store."""

    def __init__(self) -> None:
        self.context = forks.context()
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.processes: dict[Rank, Any] = {}
        self.answers: dict[Rank, Any] = {}

    def case(self, **fields: Any) -> Case:
        return Case(**{"port": self.store.port, "receivers": ENGINES, "model": MODEL, **fields})

    def run(self, case: Case, faults: dict[Rank, Fault] | None = None) -> None:
        """Start all ranks of the case."""
        faults = faults or {}
        for rank in range(SENDERS):
            key = ("trainer", 0, rank)
            self.start(key, trainer_rank, case, rank, faults.get(key, NONE))
        for engine, ranks in enumerate(case.receivers):
            for rank in range(ranks):
                key = ("engine", engine, rank)
                self.start(key, engine_rank, case, engine, rank, faults.get(key, NONE))

    def start(self, key: Rank, function: Any, *arguments: Any) -> None:
        self.answers[key], theirs = self.context.Pipe(duplex=False)
        self.processes[key] = self.context.Process(target=function, args=(theirs, *arguments), daemon=True)
        self.processes[key].start()
        theirs.close()

    def collect(self, *excluded: Rank, seconds: float = 40.0) -> dict[Rank, Any]:
        """Answers of all other ranks. Fails if a rank ends or stays silent."""
        waiting: dict[Any, Rank] = {self.answers[key]: key for key in self.answers if key not in excluded}
        found = {}
        deadline = time.monotonic() + seconds
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            assert ready, f"no answer within {seconds} s of {list(waiting.values())}"
            connection: Any
            for connection in ready:
                found[waiting.pop(connection)] = connection.recv()
        return found

    def pid(self, key: Rank) -> int:
        return self.processes[key].pid

    def end(self) -> None:
        for process in self.processes.values():
            process.join(0.1 if process.exitcode is None else 5)
            if process.is_alive():
                process.kill()
                process.join(5)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.end()


def results(answer: Any) -> dict[str, str | None]:
    """Result of a trainer rank's only transfer."""
    assert not isinstance(answer, str), answer
    return answer[0][0]


@pytest.mark.parametrize(
    ("wire", "trainer", "engine", "elements"),
    [
        ("bfloat16", "float32", "bfloat16", 90),
        ("bfloat16", "bfloat16", "float32", 5000),
        ("float32", "float32", "float32", 200),
        ("bfloat16", "bfloat16", "bfloat16", 10),
    ],
)
def test_every_engine_rank_holds_exactly_its_slices_after_each_of_several_transfers(
    ranks: Ranks, wire: str, trainer: str, engine: str, elements: int
) -> None:
    ranks.run(ranks.case(wire=wire, trainer=trainer, engine=engine, elements=elements, numbers=(1, 2, 7)))
    for key, answer in ranks.collect().items():
        expected = [] if key[0] == "engine" else [{"engine-0": None, "engine-1": None}] * 3
        assert answer[0] == expected, f"{key}: {answer}"


def test_large_slices_in_messages_with_small_ones_arrive(ranks: Ranks) -> None:
    model = {**MODEL, "huge": Part((4200, 1024), 0, 0), "wide": Part((1024, 4200), 1, 0), "end": Part((8,), 0, None)}
    ranks.run(ranks.case(model=model, elements=2**23, staging=2**27))
    for key, answer in ranks.collect().items():
        assert answer[0] == ([] if key[0] == "engine" else [{"engine-0": None, "engine-1": None}]), f"{key}: {answer}"


@pytest.mark.parametrize("trainer", ["bfloat16", "float32"])
def test_contiguous_data_of_the_transfer_dtype_need_no_staging(ranks: Ranks, trainer: str) -> None:
    ranks.run(ranks.case(model=CONTIGUOUS, elements=24, trainer=trainer, engine="bfloat16", numbers=(1, 2)))
    for key, answer in ranks.collect().items():
        assert not isinstance(answer, str), answer
        assert (answer[2] > 0) == (key[0] == "trainer" and trainer == "float32"), f"{key}: {answer[2]} bytes"


@pytest.mark.parametrize("device", ["cpu:0", pytest.param("cuda:0", marks=needs_gpu)])
def test_parameters_on_another_device_than_the_messages_are_copied_through_staging(ranks: Ranks, device: str) -> None:
    # "cpu:0" is "cpu" to a kernel, but another device to a link.
    case = ranks.case(model=CONTIGUOUS, device=device, trainer="bfloat16", engine="bfloat16", numbers=(1, 2, 3))
    ranks.run(case)
    for key, answer in ranks.collect(seconds=90.0).items():
        expected = [] if key[0] == "engine" else [{"engine-0": None, "engine-1": None}] * 3
        assert answer[0] == expected, f"{key}: {answer}"
        assert 0 < answer[2] <= case.staging, f"{key}: {answer[2]} bytes"


@pytest.mark.parametrize("model", [{"norm": Part((7,), None, None)}, {}])
def test_ranks_without_messages_participate(ranks: Ranks, model: dict[str, Part]) -> None:
    ranks.run(ranks.case(model=model, numbers=(1, 2)))
    for key, answer in ranks.collect().items():
        assert answer[0] == ([] if key[0] == "engine" else [{"engine-0": None, "engine-1": None}] * 2)


def test_additional_memory_stays_within_the_staging_limit(ranks: Ranks) -> None:
    # 48 MB on each trainer rank for two engines, half of it in strips that need staging.
    model = {"strips": Part((3000, 4096), 1, 1), "rows": Part((3000, 4096), 0, 0)}
    limit = 4 * 2**20
    case = ranks.case(model=model, elements=limit // 8, staging=limit, wire="bfloat16", verify=False)
    ranks.run(case)
    slack = 12 * 2**20  # first use of code, stacks and sockets; the data are at least four times larger
    for key, answer in ranks.collect().items():
        assert 0 < answer[2] <= limit, f"{key} has {answer[2]} bytes of staging"
        assert answer[3] < limit + slack, f"{key} grew by {answer[3]} bytes"


def test_messages_too_large_for_the_staging_limit_are_refused() -> None:
    piece = Slice("a", (100,), "a", (0,), "a", (0,))
    with pytest.raises(ValueError, match=r"take up to 800 bytes.*staging_bytes=799"):
        transport.receive(object(), [TransferMessage(0, 0, (piece,), 100)], object(), torch.float32, 799, 1, 1.0)  # type: ignore[arg-type]


def writes(case: Case, key: Rank) -> int:
    """Number of calls of a rank's Fault in a successful transfer."""
    if key[0] == "engine":
        return sum(
            len(m.slices) for m in messages(case.model, case.receivers[key[1]], case.elements) if m.receiver == key[2]
        )
    return sum(
        len(m.slices)
        for engine in case.receivers
        for m in messages(case.model, engine, case.elements)
        if m.sender == key[2]
    )


def check_engine_died(ranks: Ranks, answers: dict[Rank, Any], victim: Rank, limit: float) -> None:
    """The victim's link failed on all its ranks with the victim's name; the other engine is complete."""
    name = f"engine-{victim[1]}"
    for key, answer in answers.items():
        if key[0] == "trainer":
            reason = results(answer)[name]
            assert reason is not None
            assert f":{ranks.pid(victim)})" in reason, reason
            assert results(answer)[f"engine-{1 - victim[1]}"] is None
            assert answer[1] < limit + SLACK
        elif key[1] == victim[1]:
            # The neighbour may have received all its slices before.
            assert answer[0] == [] or answer.startswith("TransferError"), answer
        else:
            assert answer[0] == [], answer


@pytest.mark.parametrize("seed", range(12))
def test_an_engine_rank_killed_at_any_moment_fails_only_its_own_link(ranks: Ranks, seed: int) -> None:
    chance = random.Random(seed)
    victim: Rank = chance.choice([("engine", 0, 0), ("engine", 1, 0), ("engine", 1, 1)])
    case = ranks.case(seconds=KILL_SECONDS)
    after = chance.randrange(writes(case, victim))
    ranks.run(case, {victim: Fault(after=after, signal=signal.SIGKILL)})
    check_engine_died(ranks, ranks.collect(victim), victim, case.seconds)


@pytest.mark.parametrize("seed", range(10))
def test_a_trainer_rank_killed_at_any_moment_leaves_no_engine_waiting(ranks: Ranks, seed: int) -> None:
    chance = random.Random(seed)
    victim: Rank = ("trainer", 0, chance.randrange(SENDERS))
    case = ranks.case(seconds=KILL_SECONDS)
    after = chance.randrange(writes(case, victim))
    ranks.run(case, {victim: Fault(after=after, signal=signal.SIGKILL)})
    for key, answer in ranks.collect(victim).items():
        texts = list(results(answer).values()) if key[0] == "trainer" else [answer]
        for text in texts:
            assert text is None or isinstance(text, tuple) or f":{ranks.pid(victim)})" in text, text
        if key[0] == "trainer":
            assert answer[1] < case.seconds + SLACK


@pytest.mark.parametrize("victim", [("engine", 0, 0), ("engine", 1, 1)])
def test_a_stopped_engine_rank_is_named_at_the_timeout_and_blocks_no_other_engine(ranks: Ranks, victim: Rank) -> None:
    case = ranks.case(seconds=4.0)
    ranks.run(case, {victim: Fault(after=5, signal=signal.SIGSTOP)})
    answers = ranks.collect(victim)
    check_engine_died(ranks, answers, victim, case.seconds)
    reason = results(answers["trainer", 0, 0])[f"engine-{victim[1]}"]
    assert reason is not None
    assert f":{ranks.pid(victim)}) is silent" in reason
    ranks.processes[victim].kill()


def test_an_engine_rank_that_resumes_after_the_timeout_reports_the_failure(ranks: Ranks) -> None:
    victim: Rank = ("engine", 1, 1)
    ranks.run(ranks.case(seconds=3.0), {victim: Fault(after=5, signal=signal.SIGSTOP)})
    ranks.collect(victim)
    os.kill(ranks.pid(victim), signal.SIGCONT)
    text = ranks.answers.pop(victim).recv()
    assert text.startswith("TransferError: link engine-1 failed"), text
    assert "first to fail was rank" in text


def test_a_stopped_trainer_rank_is_named_by_every_engine_at_the_timeout(ranks: Ranks) -> None:
    victim: Rank = ("trainer", 0, 1)
    case = ranks.case(seconds=4.0)
    ranks.run(case, {victim: Fault(after=9, signal=signal.SIGSTOP)})
    answers = ranks.collect(victim)
    assert all(f":{ranks.pid(victim)}) is silent" in answers[key] for key in answers if key[0] == "engine")
    assert all(
        f":{ranks.pid(victim)}) is silent" in text for text in results(answers["trainer", 0, 0]).values() if text
    )
    ranks.processes[victim].kill()


def test_a_receiver_that_is_ahead_of_the_trainer_gets_the_next_transfer(ranks: Ranks) -> None:
    # Engine ranks start their second transfer while the trainer still collects confirmations of the first.
    ranks.run(ranks.case(numbers=tuple(range(1, 9)), elements=5000, verify=False))
    assert all(
        not any(answer[0]) if key[0] == "engine" else len(answer[0]) == 8 for key, answer in ranks.collect().items()
    )


def test_an_error_of_a_trainer_rank_closes_all_its_links_and_reaches_the_engines(ranks: Ranks) -> None:
    ranks.run(ranks.case(), {("trainer", 0, 0): Fault(after=6, error="no such weight")})
    answers = ranks.collect()
    assert answers["trainer", 0, 0] == "LookupError: no such weight"
    assert all("no such weight" in answers[key] for key in answers if key[0] == "engine")
    assert all("no such weight" in text for text in results(answers["trainer", 0, 1]).values() if text is not None)


def test_an_error_of_an_engine_rank_is_reported_by_its_neighbour_and_the_trainer(ranks: Ranks) -> None:
    ranks.run(ranks.case(), {("engine", 1, 0): Fault(after=0, error="layer 3 cannot be processed")})
    answers = ranks.collect()
    assert "LookupError: layer 3 cannot be processed" in answers["engine", 1, 0]
    assert "first to fail was rank 2" in answers["engine", 1, 1]
    for rank in range(SENDERS):
        found = results(answers["trainer", 0, rank])
        assert found["engine-0"] is None
        assert "layer 3 cannot be processed" in (found["engine-1"] or "")


def test_the_trainer_closes_a_link_at_once_when_the_engine_is_reported_dead(ranks: Ranks) -> None:
    case = ranks.case(seconds=20.0)
    faults = {("trainer", 0, rank): Fault(watch="worker 0 left") for rank in range(SENDERS)}
    ranks.run(case, {**faults, ("engine", 0, 0): Fault(after=3, signal=signal.SIGSTOP)})
    answers = ranks.collect(("engine", 0, 0))
    for rank in range(SENDERS):
        assert answers["trainer", 0, rank][1] < 15.0
        assert "worker 0 left" in (results(answers["trainer", 0, rank])["engine-0"] or "")
        assert results(answers["trainer", 0, rank])["engine-1"] is None
    ranks.processes["engine", 0, 0].kill()


@pytest.mark.parametrize("elements", [90, 20000])
def test_a_value_changed_after_the_write_is_detected_and_named(ranks: Ranks, elements: int) -> None:
    ranks.run(ranks.case(elements=elements), {("engine", 1, 1): Fault(flip="row")})
    answers = ranks.collect()
    text = answers["engine", 1, 1]
    assert "checksum of row.hf in row is " in text
    for key in [("engine", 1, 1), ("trainer", 0, 1)]:
        assert f":{ranks.pid(key)})" in text
    assert answers["engine", 0, 0][0] == []


def test_a_rank_that_never_joins_is_named_at_the_timeout(ranks: Ranks) -> None:
    case = ranks.case(receivers=(2,), seconds=1.0)
    ranks.start(("trainer", 0, 0), trainer_rank, case, 0, NONE)
    ranks.start(("engine", 0, 1), engine_rank, case, 0, 1, NONE)
    for text in ranks.collect().values():
        assert text == "TransferError: link engine-0: rank 1, 2 of 4 did not join within 1 s"


def test_a_rank_that_never_receives_is_named(ranks: Ranks) -> None:
    case = ranks.case(receivers=(1,), seconds=1.0)
    for rank in range(SENDERS):
        ranks.start(("trainer", 0, rank), trainer_rank, case, rank, NONE)
    ranks.start(("engine", 0, 0), silent_rank, case, 0, SENDERS)
    for answer in ranks.collect(("engine", 0, 0)).values():
        assert f":{ranks.pid(('engine', 0, 0))}) is silent" in (results(answer)["engine-0"] or "")
    ranks.processes["engine", 0, 0].kill()


def test_a_checksum_depends_on_every_bit_and_the_order() -> None:
    tensor = torch.randn(70001, generator=torch.Generator().manual_seed(0)).bfloat16()
    first = transport.checksum(tensor)
    seen = {first}
    for place in (0, 3, 4, 69999, 70000):
        for bit in range(16):
            other = tensor.clone()
            other.view(torch.int16)[place] ^= 1 << bit if bit < 15 else -(2**15)
            seen.add(transport.checksum(other))
    assert len(seen) == 1 + 5 * 16
    for one, two in ((0, 1), (0, 4), (5, 69999)):
        swapped = tensor.clone()
        swapped[[one, two]] = tensor[[two, one]]
        assert transport.checksum(swapped) not in seen
    assert transport.checksum(torch.zeros(8)) != transport.checksum(torch.zeros(10))


def test_a_checksum_ignores_shape_strides_and_alignment() -> None:
    tensor = torch.randn(60, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    first = transport.checksum(tensor)
    assert transport.checksum(tensor.view(-1, 3, 8)) == first
    assert transport.checksum(tensor.t().contiguous().t()) == first
    assert transport.checksum(torch.cat([torch.zeros(3).bfloat16(), tensor.view(-1)])[3:]) == first
    assert transport.checksum(tensor.view(torch.uint8)) == first
    assert 0 <= first < 2**64
    assert transport.checksum(torch.empty(0)) == transport.checksum(torch.empty(0, 5))
    transport.checksum(torch.tensor(1.0))


def test_slice_checksums_of_both_sides_agree_exactly_where_the_values_do() -> None:
    case = Case(0, (1,), MODEL)
    received, engine = boxes(case, 1, 0, sender=False)
    expected = dict(
        zip(
            [(m.sender, s) for m in received for s in m.slices],
            slice_checksums(received, engine),
            strict=True,
        )
    )
    for sender in range(SENDERS):
        mine, trainer = boxes(case, 1, sender, sender=True)
        assert slice_checksums(mine, trainer) == [expected[sender, s] for m in mine for s in m.slices]
        _, later = boxes(case, 2, sender, sender=True)
        assert not set(slice_checksums(mine, later)) & set(expected.values())
