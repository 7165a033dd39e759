"""Transfers between processes, through shared memory and gloo: values, memory, and errors of faults on both sides."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.weights import transport
from megatron_webrl.weights.slices import Slice, TransferMessage
from tests import forks, job_control
from tests.weights.ranks import MODEL, SENDERS, Case, Fault, Part, engine_rank, messages, trainer_rank

ENGINES = (1, 2)
CONTIGUOUS = {"stack": Part((4, 6), None, None, stacked=3), "large": Part((48, 32), 0, 0)}  # every slice, on both sides
SLACK = KILL_SECONDS = 15.0  # a busy machine may exceed a timeout by the first; silence of living ranks is shorter
NONE = Fault()
needs_gpu = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="needs a GPU")
Rank = tuple[str, int, int]  # "trainer" or "engine", which engine (0 for the trainer), rank


class Ranks:
    """Rank processes of a test. `control`: address of their control service; `backend`: of their links."""

    def __init__(self, control: Path, backend: str) -> None:
        self.context, self.control, self.backend = forks.context(), control, backend
        self.processes: dict[Rank, Any] = {}
        self.answers: dict[Rank, Any] = {}

    def case(self, **fields: Any) -> Case:
        links = {"control": self.control, "backend": self.backend, "receivers": ENGINES}
        return Case(**{**links, "model": MODEL, **fields})

    def run(self, case: Case, faults: dict[Rank, Fault] | None = None) -> None:
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


@pytest.fixture(params=["host", pytest.param("gloo", marks=pytest.mark.slow)])
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with job_control.control_service(tmp_path) as control:
        made = Ranks(control, request.param)
        yield made
        made.end()


def results(answer: Any) -> dict[str, str | None]:
    assert not isinstance(answer, str), answer
    return answer[0][0]


MIXED = {**MODEL, "huge": Part((4200, 1024), 0, 0), "wide": Part((1024, 4200), 1, 0), "end": Part((8,), 0, None)}
CASES: dict[str, dict[str, Any]] = {
    "converted by the trainer": {"engine": "bfloat16", "elements": 90, "numbers": (1, 2, 7)},
    "converted by the engine": {"trainer": "bfloat16", "elements": 5000, "numbers": (1, 2, 7)},
    "as they are": {"wire": "float32"},
    "many messages": {"trainer": "bfloat16", "engine": "bfloat16", "elements": 10},
    "large slices with small ones": {"model": MIXED, "elements": 2**23, "staging": 2**27},
    "ranks without messages": {"model": {"norm": MODEL["norm"]}, "numbers": (1, 2)},
    "no messages": {"model": {}, "numbers": (1, 2)},
    # Engine ranks start their second transfer while the trainer still collects confirmations of the first.
    "receivers ahead of the trainer": {"numbers": tuple(range(1, 9)), "elements": 5000, "verify": False},
}


@pytest.mark.parametrize("fields", CASES.values(), ids=CASES)
def test_every_engine_rank_holds_exactly_its_slices_after_each_transfer(ranks: Ranks, fields: dict[str, Any]) -> None:
    check_complete(ranks, ranks.case(**fields))


def check_complete(ranks: Ranks, case: Case) -> dict[Rank, Any]:
    """Run a case without faults; returns the answers."""
    ranks.run(case)
    answers = ranks.collect(seconds=90.0)
    for key, answer in answers.items():
        expected = [] if key[0] == "engine" else [{"engine-0": None, "engine-1": None}] * len(case.numbers)
        assert answer[0] == expected, f"{key}: {answer}"
    return answers


@pytest.mark.parametrize(
    ("device", "trainer", "staged"),
    [
        ("cpu", "bfloat16", ()),
        ("cpu", "float32", ("trainer",)),
        ("cpu:0", "bfloat16", ("trainer", "engine")),  # "cpu" to a kernel, but another device to a link
        pytest.param("cuda:0", "bfloat16", ("trainer", "engine"), marks=needs_gpu),
    ],
)
def test_only_data_of_another_dtype_or_device_need_staging(
    ranks: Ranks, device: str, trainer: str, staged: tuple[str, ...]
) -> None:
    fields = {"device": device, "trainer": trainer, "engine": "bfloat16", "numbers": (1, 2)}
    case = ranks.case(model=CONTIGUOUS, elements=24, **fields)  # a slice in each message
    for key, answer in check_complete(ranks, case).items():
        assert (answer[2] > 0) == (key[0] in staged), f"{key}: {answer[2]} bytes"
        assert answer[2] <= case.staging


def test_additional_memory_stays_within_the_staging_limit(ranks: Ranks) -> None:
    # 48 MB on each trainer rank for two engines, half of it in strips that need staging.
    model = {"strips": Part((3000, 4096), 1, 1), "rows": Part((3000, 4096), 0, 0)}
    limit = 4 * 2**20
    slack = 12 * 2**20  # first use of code, stacks and sockets; the data are at least four times larger
    for key, answer in check_complete(
        ranks, ranks.case(model=model, elements=limit // 8, staging=limit, verify=False)
    ).items():
        assert 0 < answer[2] <= limit, f"{key} has {answer[2]} bytes of staging"
        assert answer[3] < limit + slack, f"{key} grew by {answer[3]} bytes"


def test_messages_too_large_for_the_staging_limit_are_refused() -> None:
    piece = Slice("a", (100,), "a", (0,), "a", (0,))
    with pytest.raises(ValueError, match=r"800 bytes.*staging_bytes=799"):
        transport.receive(object(), [TransferMessage(0, 0, (piece,), 100)], object(), torch.float32, 799, 1, 1.0)  # type: ignore[arg-type]


def test_a_trainer_rank_that_sends_to_none_of_the_engines_has_nothing_to_do() -> None:
    assert transport.send([], lambda name: torch.empty(0), torch.float32, 2**20, 1, 1.0) == {}


def writes(case: Case, key: Rank) -> int:
    """Number of calls of a rank's Fault in a successful transfer."""
    engines = case.receivers if key[0] == "trainer" else case.receivers[key[1] : key[1] + 1]
    found = [message for engine in engines for message in messages(case.model, engine, case.elements)]
    return sum(len(m.slices) for m in found if (m.sender if key[0] == "trainer" else m.receiver) == key[2])


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


def kill_at_random(ranks: Ranks, victims: list[Rank], seed: int) -> tuple[Case, Rank, dict[Rank, Any]]:
    """Kill one of the victims at a random moment of a transfer; the case, the victim and the others' answers."""
    chance, case = random.Random(seed), ranks.case(seconds=KILL_SECONDS)
    victim = chance.choice(victims)
    ranks.run(case, {victim: Fault(after=chance.randrange(writes(case, victim)), signal=signal.SIGKILL)})
    return case, victim, ranks.collect(victim)


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 12))])
def test_an_engine_rank_killed_at_any_moment_fails_only_its_own_link(ranks: Ranks, seed: int) -> None:
    case, victim, answers = kill_at_random(ranks, [("engine", 0, 0), ("engine", 1, 0), ("engine", 1, 1)], seed)
    check_engine_died(ranks, answers, victim, case.seconds)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 12))])
def test_a_trainer_rank_killed_at_any_moment_leaves_no_engine_waiting(ranks: Ranks, seed: int) -> None:
    case, victim, answers = kill_at_random(ranks, [("trainer", 0, rank) for rank in range(SENDERS)], seed)
    for key, answer in answers.items():
        texts = list(results(answer).values()) if key[0] == "trainer" else [answer]
        for text in texts:
            assert text is None or isinstance(text, tuple) or f":{ranks.pid(victim)})" in text, text
        if key[0] == "trainer":
            assert answer[1] < case.seconds + SLACK


def test_a_stopped_engine_rank_is_named_at_the_timeout_blocks_no_other_engine_and_learns_of_it(ranks: Ranks) -> None:
    victim: Rank = ("engine", 1, 1)
    case = ranks.case(seconds=4.0)
    ranks.run(case, {victim: Fault(after=5, signal=signal.SIGSTOP)})
    answers = ranks.collect(victim)
    check_engine_died(ranks, answers, victim, case.seconds)
    reason = results(answers["trainer", 0, 0])["engine-1"]
    assert reason is not None
    assert f":{ranks.pid(victim)}) is silent" in reason
    os.kill(ranks.pid(victim), signal.SIGCONT)
    text = ranks.answers.pop(victim).recv()
    assert text.startswith("TransferError: link engine-1 failed"), text
    assert "first to fail was rank" in text


def test_a_stopped_trainer_rank_is_named_by_every_engine_at_the_timeout(ranks: Ranks) -> None:
    victim: Rank = ("trainer", 0, 1)
    ranks.run(ranks.case(seconds=4.0), {victim: Fault(after=9, signal=signal.SIGSTOP)})
    answers = ranks.collect(victim)
    texts = [answers[key] for key in answers if key[0] == "engine"]
    texts += [text for text in results(answers["trainer", 0, 0]).values() if text]
    assert all(f":{ranks.pid(victim)}) is silent" in text for text in texts)
    ranks.processes[victim].kill()


def test_an_error_of_a_trainer_rank_closes_all_its_links_and_reaches_the_engines(ranks: Ranks) -> None:
    ranks.run(ranks.case(), {("trainer", 0, 0): Fault(after=6, error="no such weight")})
    answers = ranks.collect()
    assert answers["trainer", 0, 0] == "LookupError: no such weight"
    assert all("no such weight" in answers[key] for key in answers if key[0] == "engine")
    assert all("no such weight" in text for text in results(answers["trainer", 0, 1]).values() if text is not None)


def test_an_error_of_an_engine_rank_is_reported_by_its_neighbour_and_the_trainer(ranks: Ranks) -> None:
    case = ranks.case(seconds=60.0, model=MIXED, elements=2**15, staging=2**20)  # more than is ever under way
    ranks.run(case, {("engine", 1, 0): Fault(after=0, error="layer 3 cannot be processed")})
    answers = ranks.collect()  # long before the timeout
    assert "LookupError: layer 3 cannot be processed" in answers["engine", 1, 0]
    assert "first to fail was rank 2" in answers["engine", 1, 1]
    for rank in range(SENDERS):
        found = results(answers["trainer", 0, rank])
        assert found["engine-0"] is None
        assert "layer 3 cannot be processed" in (found["engine-1"] or "")


def test_the_trainer_closes_a_link_at_once_when_the_engine_is_reported_dead(ranks: Ranks) -> None:
    faults = {("trainer", 0, rank): Fault(watch="worker 0 left") for rank in range(SENDERS)}
    ranks.run(ranks.case(seconds=20.0), {**faults, ("engine", 0, 0): Fault(after=3, signal=signal.SIGSTOP)})
    answers = ranks.collect(("engine", 0, 0))
    for rank in range(SENDERS):
        assert answers["trainer", 0, rank][1] < 15.0
        assert "worker 0 left" in (results(answers["trainer", 0, rank])["engine-0"] or "")
        assert results(answers["trainer", 0, rank])["engine-1"] is None
    ranks.processes["engine", 0, 0].kill()


def test_a_value_changed_after_the_write_is_detected_and_named(ranks: Ranks) -> None:
    ranks.run(ranks.case(elements=20000), {("engine", 1, 1): Fault(flip="row")})
    answers = ranks.collect()
    text = answers["engine", 1, 1]
    assert "checksum of row.hf in row is " in text
    for key in [("engine", 1, 1), ("trainer", 0, 1)]:
        assert f":{ranks.pid(key)})" in text
    for rank in range(SENDERS):  # no engine rank had confirmed the transfer
        assert "checksum of row.hf" in (results(answers["trainer", 0, rank])["engine-1"] or "")
    assert answers["engine", 0, 0][0] == []


def test_a_rank_that_never_joins_is_named_at_the_timeout(ranks: Ranks) -> None:
    case = ranks.case(receivers=(2,), seconds=1.0)
    ranks.start(("trainer", 0, 0), trainer_rank, case, 0, NONE)
    ranks.start(("engine", 0, 1), engine_rank, case, 0, 1, NONE)
    for text in ranks.collect().values():
        assert text == "TransferError: link engine-0: rank 1, 2 of 4 did not join within 1 s"


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
    assert transport.checksum(torch.empty(0)) == transport.checksum(torch.empty(0, 5))
    transport.checksum(torch.tensor(1.0))
