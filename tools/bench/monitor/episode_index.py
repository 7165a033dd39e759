"""The index of `webrl monitor` over 100,000 episodes: time to read it, memory, and seconds of an answer.

    python -m tools.bench.monitor.episode_index [--quick] [--json FILE]

An answer is a page of rows with the counts of all values to filter by, as the page of episodes needs it. The peer is
SQLite in memory, with the same rows and an index on the time: one query for the rows, one for each field's counts.
Seconds are processor time, so that other work on the machine does not count.
"""

from __future__ import annotations

import json
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from megatron_webrl.monitor.episode_index import FACETS, SCHEMA, EpisodeIndex, EpisodeQuery
from megatron_webrl.track.episodes import FILE, FOLDER, INDEX_FILE
from tools.arguments import make_bench_parser, write_json

EPISODES, QUICK_EPISODES = 100_000, 5_000
WORKERS = 8
REPEATS = 5
GOAL_SECONDS, GOAL_MIB = 0.2, 300.0
WORDS = [
    "find",
    "the",
    "cheapest",
    "red",
    "shoes",
    "in",
    "size",
    "42",
    "and",
    "report",
    "its",
    "price",
    "flight",
    "hotel",
    "museum",
    "opening",
    "hours",
]
QUERIES = {
    "all, newest first": (EpisodeQuery(), "1", ()),
    "failures by steps": (EpisodeQuery({"outcome": ["failure"]}, sort="steps"), "outcome = 'failure'", ()),
    "one site, reward": (
        EpisodeQuery({"site": ["shop-7.test"]}, {"reward": 0.5}), "site = 'shop-7.test' AND reward >= 0.5", (),
    ),
    "three words": (
        EpisodeQuery(text="cheap hotel shop-29"),
        "words LIKE ? AND words LIKE ? AND words LIKE ?", ("%cheap%", "%hotel%", "%shop-29%"),
    ),
}  # fmt: skip


def write_index(folder: Path, count: int) -> None:
    """Index files of workers and episodes.jsonl of a run, with generated episodes."""
    chance = random.Random(0)
    with (folder / FILE).open("w") as closed:
        for worker in range(WORKERS):
            path = folder / FOLDER / f"rollout-{worker}" / INDEX_FILE
            path.parent.mkdir(parents=True)
            with path.open("w") as file:
                for number in range(count // WORKERS):
                    line = {
                        "file": f"{number // 8 + 1:08d}.records", "position": number % 8 * 100_000, "kind": "training",
                        "ticket": worker * 10**6 + number // 8, "index": number % 8, "worker": f"rollout-{worker}.1",
                        "finished_at": round(1.8e9 + number * 3.001, 3), "task": f"web/{chance.randrange(10**6)}",
                        "source": "web", "site": f"shop-{chance.randrange(300)}.test",
                        "difficulty": chance.choice(["easy", "medium", "hard"]),
                        "instruction": " ".join(chance.choices(WORDS, k=25)),
                        "outcome": chance.choice(["success", "failure", "browser_timeout"]),
                        "end_reason": chance.choice(["answer", "steps_exhausted"]), "reason": "fact 2 is missing",
                        "reward": chance.random(), "steps": chance.randrange(1, 30),
                        "response_tokens": chance.randrange(4000), "format_errors": 0, "oldest_version": number // 100,
                        "newest_version": number // 100 + 1, "seconds": 33.2, "tries": 1,
                    }  # fmt: skip
                    file.write(json.dumps(line) + "\n")
                    identity = {name: line[name] for name in ("ticket", "index", "worker", "finished_at")}
                    closed.write(json.dumps(identity | {"disposition": "trained"}) + "\n")


def peer_of(index: EpisodeIndex) -> Callable[[str, tuple[str, ...]], None]:
    """A function that answers a condition from SQLite."""
    database = sqlite3.connect(":memory:")
    names = [*SCHEMA.names, "disposition"]
    columns = ", ".join(f'"{name}"' for name in names)
    database.execute(f"CREATE TABLE episodes ({columns})")
    database.execute("CREATE INDEX by_time ON episodes (finished_at)")
    rows = index.table.select(names).to_pylist()
    marks = ",".join("?" * len(names))
    database.executemany(f"INSERT INTO episodes VALUES ({marks})", ([row[name] for name in names] for row in rows))

    def answer(condition: str, parameters: tuple[str, ...]) -> None:
        where = f"FROM episodes WHERE {condition}"
        database.execute(f"SELECT {columns} {where} ORDER BY finished_at DESC LIMIT 50", parameters).fetchall()
        for name in FACETS:
            database.execute(f"SELECT {name}, count(*) {where} GROUP BY {name}", parameters).fetchall()

    return answer


def median_seconds(call: Callable[[], Any]) -> float:
    """Processor time of a call."""
    found = []
    for _ in range(REPEATS):
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return statistics.median(found)


def main() -> int:
    """Measure, and print a table; returns 0 if the goals hold."""
    parser = make_bench_parser(__doc__, quick=f"{QUICK_EPISODES:,} episodes")
    options = parser.parse_args()
    count = QUICK_EPISODES if options.quick else EPISODES
    with tempfile.TemporaryDirectory() as name:
        write_index(Path(name), count)
        process, started = psutil.Process(), time.process_time()
        before = process.memory_info().rss
        index = EpisodeIndex(Path(name))
        index.refresh()
        read_seconds = time.process_time() - started
        mib = (process.memory_info().rss - before) / 2**20
        answers = {text: median_seconds(partial(index.search, query)) for text, (query, _, _) in QUERIES.items()}
        peer = peer_of(index)
        peers = {
            text: median_seconds(partial(peer, condition, parameters))
            for text, (_, condition, parameters) in QUERIES.items()
        }
    print(f"{len(index):,} episodes, read in {read_seconds:.1f} s, {mib:.0f} MiB (goal {GOAL_MIB:.0f})")
    for text, seconds in answers.items():
        ratio = peers[text] / seconds
        print(f"{text:20} {1e3 * seconds:6.0f} ms   SQLite {1e3 * peers[text]:6.0f} ms   {ratio:5.1f} x")
    passed = mib <= GOAL_MIB and max(answers.values()) <= GOAL_SECONDS
    figures = {"episodes": len(index), "read_seconds": read_seconds, "mib": mib, "seconds": answers, "sqlite": peers}
    write_json(options.json, figures | {"passed": passed})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
