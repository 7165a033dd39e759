"""The index over stored episodes, compared with a plain search over all rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_webrl.config.schema import Config
from megatron_webrl.monitor.episode_index import FACETS, MAX_PAGE, EpisodeIndex, EpisodeQuery
from megatron_webrl.track.episodes import FILE, ROLLED_BACK_FILE, EpisodeStore, episode_line
from megatron_webrl.types import Trajectory
from tests.monitor.runs import episode, make_run, store

OUTCOMES = ("success", "failure", "browser_timeout")


def varied(ticket: int) -> Trajectory:
    made = episode(ticket, steps=ticket % 5, reward=float(ticket % 3 == 0))
    task = replace(made.task, website=f"shop-{ticket % 7}.test", difficulty=("easy", "hard")[ticket % 2])
    return replace(made, task=task, outcome=OUTCOMES[ticket % 3], instruction=f"Find 100% of item {ticket}_x")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Config:
    config = make_run(tmp_path_factory.mktemp("runs"))
    store(config, *([varied(ticket)] for ticket in range(60)))
    store(config, *([varied(ticket)] for ticket in range(60, 66)), kind="after")
    return config


@pytest.fixture(scope="module")
def index(run: Config) -> EpisodeIndex:
    made = EpisodeIndex(run.run_folder)
    made.refresh()
    return made


queries = st.builds(
    EpisodeQuery,
    st.fixed_dictionaries(
        {},
        optional={
            "outcome": st.lists(st.sampled_from(OUTCOMES), min_size=1),
            "site": st.lists(st.sampled_from([f"shop-{n}.test" for n in range(8)]), min_size=1),
            "kind": st.just(["training"]),
        },
    ),
    st.dictionaries(st.sampled_from(["steps", "ticket", "newest_version"]), st.integers(0, 66), max_size=2),
    st.dictionaries(st.sampled_from(["steps", "reward"]), st.floats(0, 4), max_size=1),
    st.sampled_from(["", "item", "ITEM 1", "100%", "_x", "nothing of this"]),
    st.sampled_from(["finished_at", "steps", "reward", "site"]),
    st.booleans(),
)


@given(query=queries, offset=st.integers(0, 70), limit=st.integers(1, 70))
@settings(max_examples=60)
def test_a_query_finds_what_a_plain_search_finds(index: EpisodeIndex, query: EpisodeQuery, offset: int, limit: int):
    every = index.search(EpisodeQuery(sort="ticket", descending=False), limit=MAX_PAGE).rows
    assert [row["ticket"] for row in every] == list(range(66))

    def passes(row: dict[str, object], without: str = "") -> bool:
        words = " ".join(str(row[name]) for name in ("instruction", "task", "site", "reason", "end_reason")).casefold()
        return (
            all(row[name] in values for name, values in query.equal.items() if name != without)
            and all(row[name] is not None and row[name] >= low for name, low in query.at_least.items())
            and all(row[name] is not None and row[name] <= high for name, high in query.at_most.items())
            and all(word in words for word in query.text.casefold().split())
        )

    wanted = [row for row in every if passes(row)]
    found = index.search(query, offset, limit)
    rows, total = found.rows, found.total
    assert total == len(wanted)
    assert len(rows) == min(limit, max(0, total - offset))
    everything = index.search(query, limit=MAX_PAGE).rows
    assert sorted(row["ticket"] for row in everything) == [row["ticket"] for row in wanted]
    values = [row[query.sort] for row in everything]
    assert values == sorted(values, reverse=query.descending)
    assert rows == everything[offset : offset + limit]
    facets = index.search(query).facets
    for name in FACETS:
        counts: dict[str, int] = {}
        for row in every:
            if passes(row, without=name) and row[name]:
                counts[row[name]] = counts.get(row[name], 0) + 1
        assert dict(facets[name]) == counts


def test_what_becomes_of_an_episode_is_seen_when_the_trainer_logs_it(tmp_path: Path):
    config = make_run(tmp_path)
    folder, writer = config.run_folder, EpisodeStore.of_worker(config, "rollout-0")
    first, second, third = (episode(0, n) for n in range(3))
    with (folder / FILE).open("w") as file:
        file.write(json.dumps(episode_line(first, None, 1)) + "\n")  # the trainer may be faster than the store
    index = EpisodeIndex(folder)
    index.refresh()
    assert len(index) == 0
    writer.add([first, second, third])
    index.refresh()
    assert [row["disposition"] for row in index.search(EpisodeQuery(sort="ticket"), limit=MAX_PAGE).rows].count(
        "trained"
    ) == 1
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(episode_line(second, "stale", 1)) + "\n" + '{"half')
    index.refresh()
    found = {row["index"]: row["disposition"] for row in index.search(EpisodeQuery(), limit=MAX_PAGE).rows}
    assert found == {0: "trained", 1: "stale", 2: "waiting"}
    with (folder / ROLLED_BACK_FILE).open("w") as file:
        file.write(json.dumps(episode_line(first, None, 1)) + "\n")
    index.refresh()
    assert dict(index.search(EpisodeQuery()).facets["disposition"]) == {"rolled back": 1, "stale": 1, "waiting": 1}
    assert [row["index"] for row in index.group_of(index.get(1) or {})] == [0, 1, 2]
    path = folder / "episodes" / "rollout-0" / "index.jsonl"
    path.write_text(path.read_text() + '[1]\n{"ticket": 3}\nnull\n"text"\n' + path.read_text())
    index = EpisodeIndex(folder)
    index.refresh()
    assert len(index) == 6  # without lines of another form
