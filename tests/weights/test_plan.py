"""Transfer plans of random models and layouts, executed on numbered elements."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from megatron.core.parallel_state import RankGenerator

from megatron_webrl.model import parameter_counts
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes, replica_ranks
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import (
    MAX_MESSAGE_BYTES,
    SEPARATE_BYTES,
    EngineTopology,
    TrainerTopology,
    TransferPlan,
    balance_load,
)
from megatron_webrl.weights.slices import box_index
from tests.model import tiny
from tests.weights import layouts

STAGING = 2**16


@pytest.mark.parametrize("examples", [10, pytest.param(150, marks=pytest.mark.slow)])
def test_every_element_arrives_once_from_a_near_rank_in_one_order_at_both_ends(examples: int) -> None:
    settings(max_examples=examples)(given(layouts.cases())(check_plan))()


def check_plan(case: layouts.Case) -> None:
    plan = TransferPlan(case.hf_config, case.trainer, case.engines, 2, case.staging)
    state = layouts.numbered_state(case.hf_config)
    held = [layouts.trainer_parameters(case, state, rank) for rank in range(case.trainer.ranks)]
    holders = np.zeros(1 + sum(t.numel() for t in state.values()), np.int64)  # element -> bits of ranks
    for rank, parameters in enumerate(held):
        for parameter in parameters.values():
            holders[parameter.numpy().ravel()] |= 1 << rank
    holders[0] = 0  # padding
    wanted = {
        sizes: [layouts.engine_parameters(case.hf_config, sizes, state, rank) for rank in range(sizes.ranks)]
        for sizes in {*case.engines.sizes}
    }
    for engine, sizes in enumerate(case.engines.sizes):
        check_order(plan, engine)
        check_values(case, plan, engine, held, holders, wanted[sizes])


def check_order(plan: TransferPlan, engine: int) -> None:
    """Both ends of a pair have the same messages, the k-th of every pair before any (k+1)-th."""
    everything, order = plan.messages(engine), {name: number for number, (name, _) in enumerate(plan.tensors)}
    assert plan.senders(engine) == tuple(sorted({message.sender for message in everything}))
    for rank in plan.senders(engine):
        assert plan.messages(engine, sender=rank) == tuple(m for m in everything if m.sender == rank)
    for rank in range(plan.engines.sizes[engine].ranks):
        received = tuple(m for m in everything if m.receiver == rank)
        assert plan.messages(engine, receiver=rank) == received
        assert plan.received_bytes(engine, rank) == sum(message.elements for message in received) * 2
    numbers: Counter[tuple[int, int]] = Counter()
    before, names = 0, defaultdict(list)
    for message in everything:
        pair = (message.sender, message.receiver)
        assert before <= numbers[pair] <= before + 1
        before = numbers[pair]
        numbers[pair] += 1
        assert message.elements == sum(piece.elements for piece in message.slices)
        assert 0 < message.elements * 2 <= plan.max_message_bytes
        names[pair] += [order[piece.hf_param] for piece in message.slices]
    assert all(found == sorted(found) for found in names.values())
    assert plan.bytes_by_pair(engine) == {
        pair: sum(m.elements for m in everything if (m.sender, m.receiver) == pair) * 2 for pair in numbers
    }


def check_values(
    case: layouts.Case,
    plan: TransferPlan,
    engine: int,
    held: list[dict[str, torch.Tensor]],
    holders: np.ndarray,
    wanted: list[dict[str, torch.Tensor]],
) -> None:
    """Every element is written once, and sent from the receiver's node if a replica is there."""
    got = [{n: torch.full_like(t, layouts.PADDING) for n, t in want.items()} for want in wanted]
    times = [{n: torch.zeros_like(t) for n, t in want.items()} for want in wanted]
    for message in plan.messages(engine):
        node = case.engines.nodes[engine][message.receiver]
        near = sum(1 << rank for rank, where in enumerate(case.trainer.nodes) if where == node)
        for piece in message.slices:
            box = held[message.sender][piece.source_param][box_index(piece.source_offset, piece.size)]
            target = box_index(piece.target_offset, piece.size)
            assert box.shape == got[message.receiver][piece.target_param][target].shape == piece.size
            got[message.receiver][piece.target_param][target] = box
            times[message.receiver][piece.target_param][target] += 1
            if not near >> message.sender & 1:
                assert not (holders[box.numpy().ravel()] & near).any()
    for receiver, want in enumerate(wanted):
        shapes = engine_parameter_shapes(case.hf_config, case.engines.sizes[engine], receiver)
        assert shapes == {name: tuple(tensor.shape) for name, tensor in want.items()}
        for name, tensor in want.items():
            assert torch.equal(got[receiver][name], tensor), name
            assert torch.equal(times[receiver][name], (tensor != layouts.PADDING).long()), name


def test_balanced_loads_avoid_ranks_that_must_send_other_slices() -> None:
    shares = balance_load({(0,): 90, (0, 1, 2): 60, (1, 2, 3): 30})
    assert shares[(0,)] == [90]
    assert shares[(0, 1, 2)][0] == 0
    load = [90, shares[0, 1, 2][1] + shares[1, 2, 3][0], shares[0, 1, 2][2] + shares[1, 2, 3][1], shares[1, 2, 3][2]]
    assert load[1:] == pytest.approx([30, 30, 30], abs=1)
    # The first set gives way once the second has its shares.
    shares = balance_load({(0, 1): 10, (1, 2): 100, (2, 3): 10})
    assert shares == {(0, 1): [10, 0], (1, 2): [50, 50], (2, 3): [0, 10]}


def some_plan(**changes: Any) -> TransferPlan:
    arguments = {
        "hf_config": tiny.configuration(changes.pop("shape", tiny.Shape(experts=4))),
        "trainer": TrainerTopology(ParallelSizes(tensor=2, pipeline=2), 8, ("a",) * 4 + ("b",) * 4),
        "engines": EngineTopology.uniform(EngineSizes(2), (("a", "a"), ("b", "b"))),
        "item_bytes": 2,
        "staging_bytes": STAGING,
    }
    return TransferPlan(**arguments | changes)


def test_senders_start_with_different_receivers() -> None:
    trainer = TrainerTopology(ParallelSizes(pipeline=4), 4, ("a",) * 4)
    plan = some_plan(trainer=trainer, engines=EngineTopology.uniform(EngineSizes(4), (("b",) * 4,)))
    for rank in range(4):
        assert [message.receiver for message in plan.messages(0, sender=rank)[:4]] == [(rank + i) % 4 for i in range(4)]


def test_ranks_agree_on_the_digest_and_any_difference_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = some_plan()
    assert some_plan().digest == plan.digest
    trainer, engines = plan.trainer, plan.engines
    others: list[dict[str, Any]] = [
        {"shape": tiny.Shape(experts=4, tie=True)},
        {"shape": tiny.Shape(experts=4, deepstack=(0, 1))},
        {"trainer": replace(trainer, sizes=ParallelSizes(tensor=2, pipeline=2, virtual=2))},
        {"trainer": replace(trainer, nodes=("a",) * 8)},
        {"engines": replace(engines, nodes=(("a", "a"), ("a", "b")))},
        {"item_bytes": 4},
        {"staging_bytes": 2 * STAGING},
    ]
    digests = [plan.digest, *(some_plan(**change).digest for change in others)]
    for name in ("MAP_VERSION", "_RULE_VERSION"):  # of another version of this package
        monkeypatch.setattr(f"megatron_webrl.weights.plan.{name}", 99)
        digests.append(some_plan().digest)
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"trainer": TrainerTopology(ParallelSizes(tensor=2, pipeline=2), 6, ("a",) * 6)},
            "tensor_parallel x context_parallel x pipeline_parallel=4 .*trainer_ranks=6",
        ),
        ({"trainer": TrainerTopology(ParallelSizes(tensor=4), 8, ("a",) * 8)}, "tensor_parallel=4 .*num_key_value"),
        (
            {"engines": EngineTopology.uniform(EngineSizes(8), (("a",) * 8,))},
            r"tensor_parallel=8 .*num_attention_heads=4 \(engine\)",
        ),
    ],
)
def test_layouts_that_do_not_match_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        some_plan(**change)


def test_the_staging_memory_named_in_the_error_is_sufficient() -> None:
    with pytest.raises(ValueError, match=r"100 bytes .* at least .* \(weights.bucket_mib\)") as refused:
        some_plan(staging_bytes=100)
    least = int(str(refused.value).split("give at least ")[1].split()[0])
    assert some_plan(staging_bytes=least).max_message_bytes > 0
    with pytest.raises(ValueError, match="give at least"):
        some_plan(staging_bytes=least - 1)


@pytest.mark.parametrize(
    ("sizes", "data"),
    [
        (ParallelSizes(tensor=2, pipeline=2, context=2), 2),
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


def test_large_slices_of_a_released_model_are_sent_alone_and_nothing_is_left_out() -> None:
    hf_config = parameter_counts.make_hf_config("2B")
    assert hf_config.text_config.vocab_size % 64 == 0  # so there is no padding
    trainer = TrainerTopology(ParallelSizes(tensor=2, pipeline=2), 8, ("a",) * 4 + ("b",) * 4)
    engines = EngineTopology.uniform(EngineSizes(2), (("a",) * 2, ("b",) * 2))
    plan = TransferPlan(hf_config, trainer, engines, 2, 512 * 2**20)
    for receiver in range(2):
        shapes = engine_parameter_shapes(hf_config, engines.sizes[0], receiver).values()
        received = plan.messages(1, receiver=receiver)
        sent = sum(message.elements for message in received)
        assert sent == sum(math.prod(shape) for shape in shapes)
        assert max(message.elements for message in received) * 2 == MAX_MESSAGE_BYTES == plan.max_message_bytes
        assert all(s.elements * 2 < SEPARATE_BYTES for m in received if len(m.slices) > 1 for s in m.slices)


def test_256_engines_share_the_trainer() -> None:
    hf_config = tiny.configuration(tiny.Shape())
    trainer = TrainerTopology(ParallelSizes(tensor=2), 256, tuple(f"n{rank // 8}" for rank in range(256)))
    engines = EngineTopology.uniform(EngineSizes(1), tuple((f"n{engine // 8}",) for engine in range(256)))
    plan = TransferPlan(hf_config, trainer, engines, 2, 2**22)
    assert sum(plan.bytes_by_sender().values()) == 256 * plan.received_bytes(0)
    assert max(plan.bytes_by_sender().values()) <= 1.1 * plan.received_bytes(0)
