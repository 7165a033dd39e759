"""Experts by request, with those of tokens that an earlier request computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_webrl.weights.expert_store import ExpertStore, ScheduledTokens

BLOCK, LOST = 4, 255


def rows(*numbers: int) -> np.ndarray:
    """Experts [tokens, 3, 2] that name their token."""
    return np.broadcast_to(np.array(numbers, np.uint8)[:, None, None], (len(numbers), 3, 2))


def names(experts: np.ndarray | None) -> list[int]:
    assert experts is not None
    assert (experts == experts[:, :1, :1]).all()
    return experts[:, 0, 0].tolist()


def test_steps_of_a_request_add_up_after_the_cached_tokens_of_the_request_that_computed_them() -> None:
    store = ExpertStore(8, BLOCK)
    store.add_step({"a": ScheduledTokens(0, 0, [5, 2], True)}, {"a": rows(1, 2, 3, 4, 5, 6, 7, 8)})
    store.add_step({"a": ScheduledTokens(8, 2, [3], False)}, {"a": rows(9)})
    assert names(store.take("a")) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert store.take("a") is None
    store.add_step({"b": ScheduledTokens(8, 0, [5, 2, 6], True)}, {"b": rows(19)})
    store.add_step({"b": ScheduledTokens(9, 2, [6], False)}, {"b": rows(20)})
    assert names(store.take("b")) == [1, 2, 3, 4, 5, 6, 7, 8, 19, 20]


def test_a_token_that_is_computed_again_has_its_last_experts() -> None:
    """The request itself computes it, or finds it in the cache, where another has computed it again."""
    store = ExpertStore(8, BLOCK)
    old = {name: ScheduledTokens(0, 0, [block, block + 1], True) for name, block in (("a", 0), ("b", 2))}
    store.add_step(old, {"a": rows(1, 2, 3, 4, 5), "b": rows(1, 2, 3, 4, 6)})
    store.add_step({"a": ScheduledTokens(0, 0, [4, 6], True)}, {"a": rows(11, 12, 13, 14, 15, 17)})
    store.add_step({"b": ScheduledTokens(4, 0, [4, 7], True)}, {"b": rows(16, 18)})
    assert names(store.take("a")) == [11, 12, 13, 14, 15, 17]
    assert names(store.take("b")) == [11, 12, 13, 14, 16, 18]


def test_unknown_tokens_are_marked_and_aborted_requests_forgotten() -> None:
    store = ExpertStore(8, BLOCK)
    store.add_step({"a": ScheduledTokens(0, 0, [0], True)}, {"a": rows(1, 2)})
    store.add_step(
        {"a": ScheduledTokens(3, 0, [0], False), "b": ScheduledTokens(0, 0, [1], True)}, {"a": rows(4), "b": rows(1)}
    )
    store.add_step({"c": ScheduledTokens(4, 0, [3, 2], True)}, {"c": rows(5)})
    store.retain({"a", "c"})
    assert names(store.take("a")) == [1, 2, LOST, 4]
    assert store.take("b") is None
    assert names(store.take("c")) == [LOST] * 4 + [5]


def test_a_request_begins_with_its_first_block_also_after_a_preemption() -> None:
    from megatron_webrl.weights import vllm_scheduler

    blocks = {
        name: [SimpleNamespace(block_id=each) for each in range(10 * i, 10 * i + 3)] for i, name in enumerate("abc")
    }
    manager = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(req_to_blocks=blocks)]))
    scheduler = object.__new__(vllm_scheduler._Recomputing)
    scheduler.kv_cache_manager, scheduler._group = manager, 0
    step = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=4)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["b", "c"], num_computed_tokens=[8, 7], resumed_req_ids={"b"}),
        num_scheduled_tokens={"a": 3, "b": 2, "c": 1},
    )
    assert scheduler._tokens_of(step, BLOCK) == {
        "a": ScheduledTokens(4, 0, [0, 1], True),
        "b": ScheduledTokens(8, 0, [10, 11, 12], True),
        "c": ScheduledTokens(7, 1, [21], False),
    }


def test_a_request_that_is_aborted_while_its_step_runs_leaves_its_experts_to_those_that_use_its_blocks() -> None:
    from megatron_webrl.weights import vllm_scheduler

    class Scheduler:
        """vLLM's, in which the request "a" was aborted before the output of the step arrived."""

        def update_from_output(self, step: Any, output: Any) -> dict[int, Any]:
            ended = SimpleNamespace(request_id="b", finish_reason="stop", routed_experts=None)
            return {0: SimpleNamespace(outputs=[ended])}

    scheduler = object.__new__(type("Recording", (vllm_scheduler._Recomputing, Scheduler), {}))
    scheduler._experts, scheduler.requests, step = ExpertStore(8, BLOCK), {"b": None}, object()
    tokens = {"a": ScheduledTokens(0, 0, [7], True), "b": ScheduledTokens(4, 0, [7, 1], True)}
    scheduler._scheduled = {id(step): tokens}
    recorded = {"a": SimpleNamespace(rows=rows(1, 2, 3, 4)), "b": SimpleNamespace(rows=rows(15))}
    outputs = scheduler.update_from_output(step, SimpleNamespace(aux_output_connector_output=recorded))
    assert names(outputs[0].outputs[0].routed_experts) == [1, 2, 3, 4, 15]
    assert scheduler._experts.take("a") is None
