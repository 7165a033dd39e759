"""Every plan, and every failure of a small one, with the product's NcclChannel in NCCL's order of operations."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.hf_config import load_hf_config
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.parameter_map import parameter_shapes
from megatron_webrl.placement.placement import place_processes
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import TransferMessage
from tests.weights import layouts
from tests.weights.nccl_order import OrderError, Ranks, Stream

ROOT = Path(__file__).parents[2]
CONFIGS = sorted({*(ROOT / "configs").rglob("*.yaml")} - {*(ROOT / "configs" / "eval").iterdir()})
LONG = {"30b_a3b_32node", "qwen3_5_35b_a3b_4node", "qwen3_5_122b_a10b_32node", "235b_a22b_32node"}
LONGEST = {"qwen3_5_122b_a10b_32node", "235b_a22b_32node"}
SECONDS = 2.0


class MetaTensors(dict[str, torch.Tensor]):
    """Parameters without memory, and the elements that were written to them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__({name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()})
        self.written = 0

    def tensor(self, parameter: str) -> torch.Tensor:
        return self[parameter]

    def mark_written(self, parameter: str, elements: int) -> None:
        self.written += elements


def plan_of(config: Config) -> tuple[Any, TransferPlan]:
    """The model and the plan of a job of a configuration, as its trainer and engines compute it."""
    size = parameter_counts.size_from_path(config.model.path)
    hf_config = parameter_counts.make_hf_config(size) if size else load_hf_config(ROOT / "models" / "quickstart")
    placement, t, r = place_processes(config), config.trainer, config.rollout
    sizes = ParallelSizes(
        t.tensor_parallel, t.pipeline_parallel, t.virtual_pipeline, t.expert_parallel, t.expert_tensor_parallel,
        t.context_parallel,
    )  # fmt: skip
    nodes = [f"node-{process.node}" for process in placement.of_role("trainer")]
    engines = defaultdict(list)
    for process in placement.of_role("rollout"):
        engines[process.index] += [f"node-{process.node}"] * max(len(process.devices), 1)
    engine = EngineSizes(r.tensor_parallel, r.pipeline_parallel, r.expert_parallel)
    receivers = EngineTopology.uniform(engine, [tuple(engines[index]) for index in sorted(engines)])
    staging, item_bytes = config.weights.bucket_mib * 2**20, getattr(torch, config.engine_dtype).itemsize
    trainer = TrainerTopology(sizes, len(nodes), tuple(nodes))
    return hf_config, TransferPlan(hf_config, trainer, receivers, item_bytes, staging)


def chosen_engines(plan: TransferPlan) -> list[int]:
    """All engines of one node; of more, one for each number of senders."""
    engines = range(len(plan.engines.sizes))
    return list({len(plan.senders(e)) if len(engines) > 4 else e: e for e in engines}.values())


def transfer(ranks: Ranks, hf_config: Any, plan: TransferPlan, engines: list[int]) -> None:
    """Transfer a plan to these engines, with parameters that have no memory, and compare what every rank did with it.

    A trainer rank gets the share of its staging memory that these engines have in its whole plan.
    """
    dtype = torch.bfloat16 if plan.item_bytes == 2 else torch.float32
    sizes = plan.trainer.sizes
    held = MetaTensors(parameter_shapes(parameter_mappings(hf_config), sizes.tensor, sizes.expert_tensor), dtype)
    outgoing: dict[int, list[Any]] = defaultdict(list)
    targets = {}
    for engine in engines:
        senders, receivers = plan.senders(engine), plan.engines.sizes[engine].ranks
        links = ranks.connect(f"engine {engine}", senders, receivers, "meta")
        for link, sender in zip(links, senders, strict=False):
            outgoing[sender].append((link, plan.messages(engine, sender=sender)))
        for receiver, link in enumerate(links[len(senders) :]):
            messages = plan.messages(engine, receiver=receiver)
            shapes = engine_parameter_shapes(hf_config, plan.engines.sizes[engine], receiver)
            target = targets[engine, receiver] = MetaTensors(shapes, dtype)
            work = partial(transport.receive, link, messages, target, dtype, plan.staging_bytes, 1, SECONDS)
            ranks.start(f"engine {engine} rank {receiver}", work)
    links_of = Counter(sender for engine in range(len(plan.engines.sizes)) for sender in plan.senders(engine))
    for sender, transfers in outgoing.items():
        staging = plan.staging_bytes * len(transfers) // links_of[sender]
        work = partial(transport.send, transfers, held.__getitem__, dtype, staging, 1, SECONDS)
        ranks.start(f"trainer {sender}", work)
    for name, result in ranks.run().items():
        expected = (
            {f"engine {e}": None for e in engines if int(name[8:]) in plan.senders(e)} if name[0] == "t" else None
        )
        assert result == expected, f"{name}: {result}"
    for engine in engines:
        senders = plan.senders(engine)
        planned, done = defaultdict(list), defaultdict(list)
        for message in plan.messages(engine):
            ends = senders.index(message.sender), len(senders) + message.receiver
            for rank in ends:
                planned[rank].append((*ends, message.elements))
        for entry in ranks.network.log[f"engine {engine}"]:
            for rank in entry[:2]:
                done[rank].append(entry)
        assert done == planned
        for receiver in range(plan.engines.sizes[engine].ranks):
            assert targets[engine, receiver].written * plan.item_bytes == plan.received_bytes(engine, receiver)
    groups = ranks.network.groups.values()
    assert max(group.most_messages for group in groups) <= transport.MAX_IN_FLIGHT
    assert max(group.most_bytes for group in groups) <= plan.staging_bytes


def marks(path: Path) -> list[pytest.MarkDecorator]:
    """The largest plans have a million messages; `make gpu-proof` transfers all."""
    if path.stem not in LONG:
        return []
    return [pytest.mark.timeout(900), pytest.mark.soak if path.stem in LONGEST else pytest.mark.slow]


@pytest.mark.parametrize("path", [pytest.param(p, marks=marks(p)) for p in CONFIGS], ids=lambda path: path.stem)
def test_every_plan_is_transferred_in_nccls_order(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_config, plan = plan_of(parse_config(path))
    transfer(Ranks(monkeypatch), hf_config, plan, chosen_engines(plan))


@pytest.mark.parametrize("examples", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_any_plan_is_transferred_in_nccls_order(examples: int) -> None:
    def check(case: layouts.Case) -> None:
        plan = TransferPlan(case.hf_config, case.trainer, case.engines, 2, case.staging)
        with pytest.MonkeyPatch.context() as patch:
            transfer(Ranks(patch), case.hf_config, plan, list(range(len(plan.engines.sizes))))

    settings(max_examples=examples)(given(layouts.cases())(check))()


CASE = layouts.Case(
    layouts.small_config(2, 8, 4, 0, [], 1, 129, False, 0),
    TrainerTopology(ParallelSizes(pipeline=2), 2, ("a", "b")),
    EngineTopology((EngineSizes(1), EngineSizes(2)), (("c",), ("c", "d"))),
    2**14,
)
PLAN = TransferPlan(CASE.hf_config, CASE.trainer, CASE.engines, 4, CASE.staging)
RANKS = ("trainer 0", "trainer 1", "engine 0 rank 0", "engine 1 rank 0", "engine 1 rank 1")


@cache
def state() -> dict[str, torch.Tensor]:
    return layouts.numbered_state(CASE.hf_config)


class Parameters(dict[str, torch.Tensor]):
    """An engine's parameters, which call `strike` with the number of each slice, over all transfers."""

    def __init__(self, wanted: dict[str, torch.Tensor], strike: Callable[[int], None]) -> None:
        super().__init__({name: torch.full(t.shape, float(layouts.PADDING)) for name, t in wanted.items()})
        self.strike, self.writes = strike, itertools.count()

    def tensor(self, parameter: str) -> torch.Tensor:
        return self[parameter]

    def mark_written(self, parameter: str, elements: int) -> None:
        self.strike(next(self.writes))


class Job:
    """Two pipeline stages of a small model send to an engine of one rank and to one of two."""

    def __init__(self, patch: pytest.MonkeyPatch, transfers: int = 1, seed: int = 0, stalls: bool = False) -> None:
        self.ranks, self.transfers, chance = Ranks(patch, stalls), range(1, transfers + 1), random.Random(seed)
        self.ranks.network.later = lambda run: (
            self.ranks.at(chance.random() * 0.003, run) if chance.random() > 0.2 else run()
        )
        self.links: list[list[transport.TransferLink]] = []
        self.strikes: dict[str, tuple[int, Callable[[], None]]] = {}  # of a rank: at which of its slices it does what
        self.ended: dict[str, float] = {}  # when

    def run(self, shared: dict[int, Stream] | None = None) -> dict[str, Any]:
        """Run the transfers; returns the outcome by link of trainer ranks, names of wrong tensors of engine ranks."""
        sizes = PLAN.engines.sizes
        self.links = [
            self.ranks.connect(f"engine-{n}", (0, 1), each.ranks, shared=shared) for n, each in enumerate(sizes)
        ]
        for rank in (0, 1):
            self._start(f"trainer {rank}", partial(self._send, rank))
        for engine, each in enumerate(sizes):
            for rank in range(each.ranks):
                self._start(f"engine {engine} rank {rank}", partial(self._receive, engine, rank))
        return self.ranks.run()

    def _start(self, name: str, work: Callable[[Callable[[int], None]], Any]) -> None:
        after, act = self.strikes.get(name, (-1, lambda: None))

        def run() -> Any:
            try:
                return work(lambda count: act() if count == after else None)
            finally:
                self.ended[name] = self.ranks.now

        self.ranks.start(name, run)

    def _send(self, rank: int, strike: Callable[[int], None]) -> dict[str, str | None]:
        asked, outcome = itertools.count(), dict[str, str | None]()
        outgoing = [(links[rank], PLAN.messages(engine, sender=rank)) for engine, links in enumerate(self.links)]
        for number in self.transfers:
            held = {
                name: each + float(number) for name, each in layouts.trainer_parameters(CASE, state(), rank).items()
            }

            def source(name: str, held: dict[str, torch.Tensor] = held) -> torch.Tensor:
                strike(next(asked))
                return held[name]

            outcome |= transport.send(outgoing, source, torch.float32, CASE.staging, number, SECONDS, verify=True)
            outgoing = [(link, each) for link, each in outgoing if outcome[link.name] is None]
        return outcome

    def _receive(self, engine: int, rank: int, strike: Callable[[int], None]) -> list[str]:
        link, incoming = self.links[engine][2 + rank], PLAN.messages(engine, receiver=rank)
        wanted, wrong = layouts.engine_parameters(CASE.hf_config, PLAN.engines.sizes[engine], state(), rank), []
        target = Parameters(wanted, strike)
        for number in self.transfers:
            transport.receive(link, incoming, target, torch.float32, CASE.staging, number, SECONDS, verify=True)
            for name, each in wanted.items():
                expected = each + number * (each != layouts.PADDING)
                wrong += [] if torch.equal(target[name], expected.float()) else [f"{number}: {name}"]
        return wrong

    def check(self, failed: Collection[str], text: str, stopped: str = "") -> None:
        """All ranks but a stopped one have ended in time: with an error of these engines' links, complete otherwise."""
        for name, result in self.ranks.results.items():
            if name == stopped:
                continue
            if name[0] == "t" and not isinstance(result, LookupError):
                reasons = {link: reason for link, reason in result.items() if reason}
                # Of two failed links one may have been complete before.
                assert reasons.keys() == set(failed) or (len(failed) == 2 and reasons.keys() < set(failed)), reasons
                assert all(text in reason for reason in reasons.values()), f"{name}: {reasons}"
            elif name[:8].replace(" ", "-") in failed:
                # A rank that has all its slices has nothing to wait for.
                assert result == [] or text in str(result), f"{name}: {result}"
            elif name[0] == "e":
                assert result == [], f"{name}: {result}"
                assert self.ended[name] < SECONDS / 2, f"{name} was delayed"
            assert self.ended[name] < SECONDS + 1.0, f"{name} ended after {self.ended[name]}"


def slices_of(name: str) -> int:
    """Slices of a rank in a transfer."""
    kind, number, *rest = name.split()
    if kind == "trainer":
        received = [m for engine in (0, 1) for m in PLAN.messages(engine, sender=int(number))]
    else:
        received = list(PLAN.messages(int(number), receiver=int(rest[1])))
    return sum(len(message.slices) for message in received)


def moments(every: int) -> Iterator[tuple[Job, str, int]]:
    """A job with a rank and the number of one of its slices: of each rank the first, the last and some in between."""
    for name in RANKS:
        last = slices_of(name) - 1
        for at in sorted({*range(0, last, every), last}):
            with pytest.MonkeyPatch.context() as patch:
                yield Job(patch, seed=at), name, at


def links_of(name: str) -> set[str]:
    return {"engine-0", "engine-1"} if name[0] == "t" else {name[:8].replace(" ", "-")}


every_moment = pytest.mark.parametrize("every", [100, pytest.param(5, marks=pytest.mark.slow)])


@pytest.mark.parametrize("seed", range(3))
def test_all_values_arrive_whatever_ends_first(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    for name, result in run_with_pauses(Job(monkeypatch, 3, seed), seed).items():
        assert result == ({"engine-0": None, "engine-1": None} if name[0] == "t" else []), f"{name}: {result}"


@every_moment
def test_a_rank_that_stops_at_any_slice_is_named_and_blocks_no_other_link(every: int) -> None:
    for job, name, at in moments(every):
        job.ranks.stalls = True
        job.strikes[name] = at, partial(job.ranks.pause, math.inf)
        job.run()
        number = int(name[-1]) + (0 if name[0] == "t" else 2)
        job.check(links_of(name), f"rank {number} (host:{number}) is silent", name)


@every_moment
def test_a_rank_that_fails_at_any_slice_ends_its_links_at_once_and_no_other(every: int) -> None:
    def fail() -> None:
        raise LookupError("no memory")

    for job, name, at in moments(every):
        job.strikes[name] = at, fail
        job.run()
        job.check(links_of(name), "no memory")
        assert max(job.ended.values()) < SECONDS / 2


@pytest.mark.parametrize("ranks", [(0,), (2,), (3,), (0, 2), (1, 3)], ids=str)
@every_moment
def test_a_communicator_that_fails_at_any_moment_ends_its_link_at_both_ends_and_no_other(
    every: int, ranks: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first message, in flight, in the confirmation, between two transfers; of one rank or of both sides."""
    clean = Job(monkeypatch, 2)
    clean.run()
    for at in range(0, int(750 * clean.ended["engine 1 rank 0"]), every):  # the rest of the second has no other states
        with pytest.MonkeyPatch.context() as patch:
            job = Job(patch, 2)
            for rank in ranks:
                job.ranks.at(at / 1000, lambda job=job, rank=rank: job.ranks.network.groups["engine-1", rank].abort())
            job.run()
            job.check({"engine-1"}, "aborted")
            assert max(job.ended.values()) < SECONDS / 2


def test_an_engine_that_leaves_a_transfer_without_a_word_is_named_at_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job(monkeypatch, 2, stalls=True)
    job.strikes["engine 0 rank 0"] = slices_of("engine 0 rank 0"), partial(leave, job)
    job.run()
    job.check({"engine-0"}, "rank 2 (host:2) is silent", "engine 0 rank 0")


def leave(job: Job) -> None:
    job.links[0][2].close()
    job.ranks.pause(math.inf)


def send_to_one_receiver_after_the_other(patch: pytest.MonkeyPatch) -> None:
    reorder(patch, 1, lambda message: -message.receiver)


def receive_from_one_sender_after_the_other(patch: pytest.MonkeyPatch) -> None:
    reorder(patch, 3, lambda message: -message.sender)


def receive_the_smallest_first(patch: pytest.MonkeyPatch) -> None:
    reorder(patch, 2, lambda message: message.elements)


def reorder(patch: pytest.MonkeyPatch, rank: int, key: Callable[[TransferMessage], int]) -> None:
    """Let a rank of each link process its messages in another order."""
    start = transport.LinkTransfer.__init__

    def init(self: Any, link: Any, messages: Any, *rest: Any) -> None:
        start(self, link, sorted(messages, key=key) if link.rank == rank else messages, *rest)

    patch.setattr(transport.LinkTransfer, "__init__", init)


def keep_staging_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transport.LinkTransfer, "release", lambda self, number: None)


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        (send_to_one_receiver_after_the_other, "a cycle: rank"),
        (receive_from_one_sender_after_the_other, "a cycle: rank"),
        (receive_the_smallest_first, r"receives \d+ from rank ., which sends \d+ to rank|a cycle"),
        (keep_staging_buffers, "which has posted nothing"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_an_order_that_would_block_nccl_is_reported_with_who_waits_for_whom(
    fault: Callable[[pytest.MonkeyPatch], None], report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    with pytest.raises(OrderError, match=report):
        Job(monkeypatch).run()


def test_links_on_one_stream_would_block_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `reserve_stream` gives each link a stream of its own."""
    stopped = Job(monkeypatch, stalls=True)
    stopped.strikes["engine 0 rank 0"] = 0, partial(stopped.ranks.pause, math.inf)
    assert isinstance(stopped.run({0: Stream()})["engine 1 rank 0"], transport.TransferError)
    reports = []
    for seed in range(8):  # whether ranks wait for one another is a matter of timing
        try:
            run_with_pauses(Job(monkeypatch, 3, seed), seed, {0: Stream(), 1: Stream()})
        except OrderError as error:
            reports.append(str(error))
    assert any(report.startswith("a cycle: rank") for report in reports), reports


def run_with_pauses(job: Job, seed: int, shared: dict[int, Stream] | None = None) -> dict[str, Any]:
    chance = random.Random(seed)
    for name in RANKS:
        job.strikes[name] = chance.randrange(40), lambda: job.ranks.pause(chance.random() * 0.1)
    return job.run(shared)
