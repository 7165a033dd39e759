"""Transfer plans of random models and layouts, executed on numbered elements."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import networkx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from megatron.core.parallel_state import RankGenerator

from megatron_webrl.model import parameter_counts
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes, replica_ranks
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan, balance_load
from megatron_webrl.weights.slices import TransferMessage, box_index
from tests.model import tiny
from tests.weights import layouts

STAGING = 2**16


class Transfer:
    """An executed case: trainer parameters, expected engine parameters, and the ranks that hold each element."""

    def __init__(self, case: layouts.Case, staging: int = STAGING) -> None:
        self.case = case
        self.plan = TransferPlan(case.hf_config, case.trainer, case.engines, 2, staging)
        state = layouts.numbered_state(case.hf_config)
        self.trainer_parameters = [layouts.trainer_parameters(case, state, rank) for rank in range(case.trainer.ranks)]
        alike = {
            sizes: [layouts.engine_parameters(case.hf_config, sizes, state, rank) for rank in range(sizes.ranks)]
            for sizes in {*case.engines.sizes}
        }
        self.wanted = [alike[sizes] for sizes in case.engines.sizes]  # by engine and receiver
        self.holders = np.zeros(1 + sum(t.numel() for t in state.values()), np.int64)  # element -> bits of ranks
        for rank, parameters_ in enumerate(self.trainer_parameters):
            for parameter in parameters_.values():
                self.holders[parameter.numpy().ravel()] |= 1 << rank
        self.holders[0] = 0

    def execute(self, engine: int) -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
        """By receiver: its parameters after the engine's messages, and the write count of each element."""
        wanted = self.wanted[engine]
        got = [{n: torch.full_like(t, layouts.PADDING) for n, t in want.items()} for want in wanted]
        times = [{n: torch.zeros_like(t) for n, t in want.items()} for want in wanted]
        for message in self.plan.messages(engine):
            for piece in message.slices:
                box = self.trainer_parameters[message.sender][piece.source_param][
                    box_index(piece.source_offset, piece.size)
                ]
                assert box.shape == piece.size
                target = box_index(piece.target_offset, piece.size)
                assert got[message.receiver][piece.target_param][target].shape == piece.size
                got[message.receiver][piece.target_param][target] = box
                times[message.receiver][piece.target_param][target] += 1
        return got, times

    def sent(self, message: TransferMessage) -> np.ndarray:
        """Numbers of the elements in a message."""
        parameters_ = self.trainer_parameters[message.sender]
        return np.concatenate(
            [parameters_[s.source_param][box_index(s.source_offset, s.size)].numpy().ravel() for s in message.slices]
        )


@settings(max_examples=100)
@given(case=layouts.cases(shared_nodes=True))
def test_every_element_of_every_engine_arrives_once_with_the_right_value(case: layouts.Case) -> None:
    transfer = Transfer(case)
    for engine, sizes in enumerate(case.engines.sizes):
        got, times = transfer.execute(engine)
        for receiver, want in enumerate(transfer.wanted[engine]):
            shapes = engine_parameter_shapes(case.hf_config, sizes, receiver)
            assert shapes == {name: tuple(tensor.shape) for name, tensor in want.items()}
            for name, tensor in want.items():
                assert torch.equal(got[receiver][name], tensor), name
                assert torch.equal(times[receiver][name], (tensor != layouts.PADDING).long()), name
            elements = sum(int((tensor != layouts.PADDING).sum()) for tensor in want.values())
            messages = transfer.plan.messages(engine, receiver=receiver)
            assert (
                transfer.plan.received_bytes(engine, receiver) == elements * 2 == sum(m.elements for m in messages) * 2
            )
        assert transfer.plan.received_bytes(engine) == sum(m.elements for m in transfer.plan.messages(engine)) * 2


@settings(max_examples=40)
@given(case=layouts.cases(shared_nodes=True))
def test_a_slice_is_sent_from_the_receivers_node_if_a_replica_is_there(case: layouts.Case) -> None:
    transfer = Transfer(case)
    for engine, nodes in enumerate(case.engines.nodes):
        for message in transfer.plan.messages(engine):
            node = nodes[message.receiver]
            near = sum(1 << rank for rank, where in enumerate(case.trainer.nodes) if where == node)
            if case.trainer.nodes[message.sender] != node:
                assert not (transfer.holders[transfer.sent(message)] & near).any()


@settings(max_examples=40)
@given(case=layouts.cases(shared_nodes=False))
def test_the_largest_load_of_a_sender_is_nearly_minimal(case: layouts.Case) -> None:
    transfer = Transfer(case, staging=2**11)
    wanted = torch.cat([t.flatten() for ranks in transfer.wanted for want in ranks for t in want.values()]).numpy()
    copies = np.bincount(wanted[wanted > 0], minlength=len(transfer.holders))
    demands = {int(bits): int(copies[transfer.holders == bits].sum()) for bits in np.unique(transfer.holders) if bits}
    load = transfer.plan.bytes_by_sender()
    assert sum(load.values()) == 2 * int(copies.sum())
    # Shares are cut at rows, so a rank may have a message more than its part.
    assert max(load.values()) <= 1.1 * 2 * least_maximum(demands) + transfer.plan.max_message_bytes


def least_maximum(demands: dict[int, int]) -> int:
    """Smallest possible maximum load if demands are divided freely; by maximum flows."""
    ranks = [rank for rank in range(63) if any(bits >> rank & 1 for bits in demands)]
    total = sum(demands.values())

    def suffices(limit: int) -> bool:
        graph: Any = networkx.DiGraph()
        for bits, demand in demands.items():
            graph.add_edge("source", ("set", bits), capacity=demand)
            for rank in ranks:
                if bits >> rank & 1:
                    graph.add_edge(("set", bits), rank)
        for rank in ranks:
            graph.add_edge(rank, "sink", capacity=limit)
        return networkx.maximum_flow_value(graph, "source", "sink") == total

    low, high = total // len(ranks), total
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle + 1, high)
    return low


@settings(max_examples=40)
@given(case=layouts.cases(shared_nodes=True))
def test_both_ends_of_a_pair_have_the_same_messages_in_the_same_order(case: layouts.Case) -> None:
    plan = TransferPlan(case.hf_config, case.trainer, case.engines, 2, STAGING)
    order = {name: number for number, (name, _) in enumerate(plan.tensors)}
    for engine in range(len(case.engines.nodes)):
        everything = plan.messages(engine)
        assert plan.senders(engine) == tuple(sorted({message.sender for message in everything}))
        for rank in plan.senders(engine):
            assert plan.messages(engine, sender=rank) == tuple(m for m in everything if m.sender == rank)
        for rank in range(case.engines.sizes[engine].ranks):
            assert plan.messages(engine, receiver=rank) == tuple(m for m in everything if m.receiver == rank)
        numbers: Counter[tuple[int, int]] = Counter()
        before, names = 0, defaultdict(list)
        for message in everything:
            pair = (message.sender, message.receiver)
            assert before <= numbers[pair] <= before + 1, "the k-th of every pair comes before any (k+1)-th"
            before = numbers[pair]
            numbers[pair] += 1
            assert message.elements == sum(piece.elements for piece in message.slices)
            assert 0 < message.elements * 2 <= plan.max_message_bytes
            names[pair] += [order[piece.hf_param] for piece in message.slices]
        assert all(found == sorted(found) for found in names.values())
        assert plan.bytes_by_pair(engine) == {
            pair: sum(m.elements for m in everything if (m.sender, m.receiver) == pair) * 2 for pair in numbers
        }


def test_senders_start_with_different_receivers() -> None:
    trainer = TrainerTopology(ParallelSizes(pipeline=4), 4, ("a",) * 4)
    plan = TransferPlan(**some_case(trainer=trainer, engines=EngineTopology.uniform(EngineSizes(4), (("b",) * 4,))))
    assert [plan.messages(0, sender=rank)[0].receiver for rank in range(4)] == [0, 1, 2, 3]
    for rank in range(4):
        assert {message.receiver for message in plan.messages(0, sender=rank)[:4]} == {0, 1, 2, 3}


def some_case(**changes: Any) -> dict[str, Any]:
    """Arguments of a plan with changes."""
    shape = changes.pop("shape", tiny.Shape(experts=4))
    arguments = {
        "hf_config": tiny.configuration(shape),
        "trainer": TrainerTopology(ParallelSizes(tensor=2, pipeline=2), 8, ("a",) * 4 + ("b",) * 4),
        "engines": EngineTopology.uniform(EngineSizes(2), (("a", "a"), ("b", "b"))),
        "item_bytes": 2,
        "staging_bytes": STAGING,
    }
    return arguments | changes


def test_ranks_agree_on_the_digest_and_any_difference_changes_it() -> None:
    plan = TransferPlan(**some_case())
    assert TransferPlan(**some_case()).digest == plan.digest
    assert len(plan.digest) == 64
    trainer, engines = some_case()["trainer"], some_case()["engines"]
    others = [
        {"shape": tiny.Shape(experts=8)},
        {"shape": tiny.Shape(experts=4, tie=True)},
        {"shape": tiny.Shape(experts=4, layers=5)},
        {"shape": tiny.Shape(experts=4, key_value_heads=4)},
        {"shape": tiny.Shape(experts=4, dense_layers=(1,))},
        {"shape": tiny.Shape(experts=4, deepstack=(0, 1))},
        {"shape": tiny.Shape()},
        {"trainer": replace(trainer, sizes=ParallelSizes(tensor=2, pipeline=2, virtual=2))},
        {"trainer": replace(trainer, sizes=ParallelSizes(tensor=2, pipeline=2, expert=2))},
        {"trainer": replace(trainer, sizes=ParallelSizes(tensor=2, pipeline=2, expert_tensor=2))},
        {"trainer": replace(trainer, sizes=ParallelSizes(tensor=1, pipeline=2, context=2))},
        {"trainer": replace(trainer, nodes=("a",) * 8)},
        {"engines": EngineTopology(engines.sizes[:1], engines.nodes[:1])},
        {"engines": replace(engines, nodes=(("a", "a"), ("a", "b")))},
        {"engines": replace(engines, sizes=(EngineSizes(1, 2), EngineSizes(2)))},
        {"engines": replace(engines, sizes=(EngineSizes(2, expert_parallel=True),) * 2)},
        {"item_bytes": 4},
        {"staging_bytes": 2 * STAGING},
    ]
    digests = [plan.digest, *(TransferPlan(**some_case(**change)).digest for change in others)]
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trainer": TrainerTopology(ParallelSizes(tensor=2, pipeline=2), 6, ("a",) * 6)},
            "tensor_parallel x context_parallel x pipeline_parallel=4 does not divide trainer_ranks=6",
        ),
        (
            {"trainer": TrainerTopology(ParallelSizes(tensor=4), 8, ("a",) * 8)},
            "tensor_parallel=4 does not divide num_key_value",
        ),
        (
            {"engines": EngineTopology.uniform(EngineSizes(8), (("a",) * 8,))},
            r"tensor_parallel=8 does not divide num_attention_heads=4 \(engine\)",
        ),
        ({"engines": EngineTopology.uniform(EngineSizes(1, 5), (("a",) * 5,))}, "engine pipeline=5 exceeds 4 layers"),
        ({"staging_bytes": 100}, r"staging memory of 100 bytes .* give at least .* \(weights.bucket_mib\)"),
    ],
)
def test_layouts_that_do_not_match_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferPlan(**some_case(**change))


def test_the_staging_memory_named_in_the_error_is_sufficient() -> None:
    with pytest.raises(ValueError, match="give at least") as refused:
        TransferPlan(**some_case(staging_bytes=100))
    least = int(str(refused.value).split("give at least ")[1].split()[0])
    assert TransferPlan(**some_case(staging_bytes=least)).max_message_bytes > 0
    with pytest.raises(ValueError, match="give at least"):
        TransferPlan(**some_case(staging_bytes=least - 1))


def test_balanced_loads_avoid_ranks_that_must_send_other_slices() -> None:
    shares = balance_load({(0,): 90, (0, 1, 2): 60, (1, 2, 3): 30})
    assert shares[(0,)] == [90]
    assert shares[(0, 1, 2)][0] == 0
    load = [90, shares[0, 1, 2][1] + shares[1, 2, 3][0], shares[0, 1, 2][2] + shares[1, 2, 3][1], shares[1, 2, 3][2]]
    assert load[1:] == pytest.approx([30, 30, 30], abs=1)


@pytest.mark.parametrize(
    ("sizes", "data"),
    [
        (ParallelSizes(tensor=2, pipeline=2, context=2), 2),
        (ParallelSizes(tensor=1, pipeline=2, expert=4), 8),
        (ParallelSizes(tensor=4, pipeline=1, expert=2, expert_tensor=2), 3),
    ],
)
def test_replica_ranks_are_megatrons_data_parallel_groups(sizes: ParallelSizes, data: int) -> None:
    ranks = sizes.tensor * sizes.context * sizes.pipeline * data
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(sizes.tensor, 1, data, sizes.pipeline, sizes.context, order).get_ranks("dp-cp")
    replicas = ranks // (sizes.expert * sizes.expert_tensor * sizes.pipeline)
    experts = RankGenerator(sizes.expert_tensor, sizes.expert, replicas, sizes.pipeline, 1, order).get_ranks("dp")
    hf_config = tiny.configuration(tiny.Shape(experts=4, key_value_heads=4))
    found: dict[bool, set[tuple[int, ...]]] = defaultdict(set)
    for mapping in parameter_mappings(hf_config):
        if mapping.layout.kind != "replicated":
            found[mapping.expert is not None].update(replica_ranks(mapping, hf_config, sizes, ranks))
    assert found[False] == {tuple(group) for group in dense}
    assert found[True] == {tuple(group) for group in experts}


def test_a_plan_for_the_largest_model_on_32_nodes_has_the_right_totals() -> None:
    hf_config = parameter_counts.make_hf_config("235B-A22B")
    nodes = tuple(f"n{rank // 8}" for rank in range(256))
    trainer = TrainerTopology(ParallelSizes(tensor=4, pipeline=8, expert=8), 256, nodes)
    engines = EngineTopology.uniform(EngineSizes(8), tuple((f"n{node}",) * 8 for node in range(32)))
    plan = TransferPlan(hf_config, trainer, engines, 2, 512 * 2**20)
    assert hf_config.text_config.vocab_size % 64 == 0  # so there is no padding
    for receiver in (0, 7):
        shapes = engine_parameter_shapes(hf_config, engines.sizes[0], receiver).values()
        assert plan.received_bytes(3, receiver) == 2 * sum(math.prod(shape) for shape in shapes)
    load = plan.bytes_by_sender()
    assert (
        sum(load.values()) == 32 * plan.received_bytes(0) == 32 * sum(plan.received_bytes(0, rank) for rank in range(8))
    )
    assert max(load.values()) <= 1.1 * sum(load.values()) / 256
    received = plan.messages(31, receiver=7)
    assert sum(message.elements for message in received) * 2 == plan.received_bytes(31, 7)
    sender = plan.senders(31)[0]
    assert set(plan.messages(31, sender=sender, receiver=7)) <= set(received)


def test_256_engines_share_the_trainer() -> None:
    hf_config = tiny.configuration(tiny.Shape())
    trainer = TrainerTopology(ParallelSizes(tensor=2), 256, tuple(f"n{rank // 8}" for rank in range(256)))
    engines = EngineTopology.uniform(EngineSizes(1), tuple((f"n{engine // 8}",) for engine in range(256)))
    plan = TransferPlan(hf_config, trainer, engines, 2, 2**22)
    assert sum(plan.bytes_by_sender().values()) == 256 * plan.received_bytes(0)
    assert max(plan.bytes_by_sender().values()) <= 1.1 * plan.received_bytes(0)
