"""The sampler log, views of its prefixes, and names of units."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.config.tasks import TasksConfig
from megatron_webrl.tasks.sampler.knowledge import BLOCK, NOTHING_KNOWN, PASS, Entry, SamplerKnowledge, SamplerLog
from megatron_webrl.tasks.sampler.units import draws_environments, task_key, task_unit, unit_kind, unit_of
from megatron_webrl.types import Task

ENTRIES = st.lists(
    st.tuples(st.sampled_from("abc"), st.none() | st.tuples(st.floats(0, 1), st.integers(1, 9)), st.booleans())
)


def make_log(changes: list) -> SamplerLog:
    log = SamplerLog()
    for name, value, is_pass in changes:
        log.append(PASS if is_pass else BLOCK, name, value if is_pass or value is None else value[0])
    return log


def facts(view: SamplerKnowledge) -> tuple:
    return [(view.pass_rate(name), view.groups(name)) for name in "abc"], view.blocked


def replayed(changes: list) -> tuple:
    """The oracle: dictionaries to which the entries are applied in order."""
    rates: dict = {}
    blocks: dict = {}
    for name, value, is_pass in changes:
        known, value = (rates, value) if is_pass else (blocks, value and value[0])
        known.pop(name, None)
        if value is not None:
            known[name] = value
    return [rates.get(name, (None, 0)) for name in "abc"], frozenset(blocks)


@given(ENTRIES)
def test_every_prefix_of_a_log_is_known_while_the_log_grows(changes: list) -> None:
    log = make_log(changes)
    for learned in range(len(changes) + 1):
        assert facts(log.at(learned)) == replayed(changes[:learned])


@given(ENTRIES, st.data())
def test_a_fold_keeps_the_prefixes_from_the_base_on(changes: list, data: st.DataObject) -> None:
    log = make_log(changes)
    base = data.draw(st.integers(0, len(changes)))
    log.fold(base)
    assert [entry.position for entry in log.entries] == list(range(base, len(changes)))
    for learned in range(base, len(changes) + 1):
        assert facts(log.at(learned)) == replayed(changes[:learned])
    for learned in (base - 1, len(changes) + 1):
        with pytest.raises(ValueError, match=rf"positions {base}..{len(changes)} does not know the prefix {learned}"):
            log.at(learned)


@given(ENTRIES, st.data())
def test_a_log_survives_json(changes: list, data: st.DataObject) -> None:
    log = make_log(changes)
    log.fold(data.draw(st.integers(0, len(changes))))
    read = SamplerLog.from_json(json.loads(json.dumps(log.to_json())))
    assert (read.base, read.end) == (log.base, log.end)
    for learned in range(log.base, log.end + 1):
        assert facts(read.at(learned)) == facts(log.at(learned))


def test_positions_may_leave_gaps_but_never_fall() -> None:
    log = SamplerLog(5)
    log.add(Entry(9, PASS, "a", [0.25, 3]))
    assert (log.at(9).groups("a"), log.at(10).groups("a")) == (0, 3)
    with pytest.raises(ValueError, match="entry at 9 of a sampler log that ends at 10"):
        log.add(Entry(9, BLOCK, "a", 1.0))


def test_estimates_of_too_few_groups_are_not_trusted() -> None:
    log = SamplerLog()
    assert log.at(0).pass_rates(["a", "b"], 0.5, 2) == [0.5, 0.5]
    log.append(PASS, "a", [0.9, 1])
    log.append(PASS, "b", [0.1, 2])
    assert log.at(2).pass_rates(["a", "b", "c"], 0.5, 2) == [0.5, 0.1, 0.5]
    assert log.at(2).pass_rates(["a", "b"], 0.5) == [0.9, 0.1]


def test_nothing_is_known_at_first() -> None:
    assert NOTHING_KNOWN.pass_rate("a") is None
    assert (NOTHING_KNOWN.groups("a"), NOTHING_KNOWN.blocked, NOTHING_KNOWN.version) == (0, frozenset(), 0)


def test_a_unit_is_named_after_what_the_sampler_draws() -> None:
    task = Task("shop/1", "web", "Shopping", 0, 10, difficulty="hard", website="shop.example")
    named = {kind: unit_of(task, kind) for kind in ("environment", "task", "website", "difficulty")}
    # A resumed run relies on the key.
    assert named == {
        "environment": "Shopping", "task": "bb4e6eb49d732433", "website": "shop.example", "difficulty": "hard"
    }  # fmt: skip
    assert task_unit(task_key("shop/1")) == named["task"]
    assert task_unit(10) == "000000000000000a"


@pytest.mark.parametrize(
    ("source", "kind"),
    [("miniwob", "environment"), ("sites", "environment"), ("webgym", "website"), ("a:B", "website")],
)
def test_only_pages_of_our_own_are_drawn_by_environment(source: str, kind: str) -> None:
    tasks = TasksConfig(source=source)
    tasks.sampler.per = "website"
    assert unit_kind(tasks) == kind
    assert draws_environments(tasks) is (kind == "environment")
