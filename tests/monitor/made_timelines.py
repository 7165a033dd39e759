"""Timeline files made by hand: a trainer, and workers on other nodes, whose monotonic clocks differ."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.track.timeline import FOLDER
from tests.monitor.runs import make_run

UNIX = 1.7e9  # at second 0
Span = tuple[str, str, float, float, dict[str, Any]]  # name, track, start and end in seconds


def write_process(
    folder: Path, role: str, spans: Sequence[Span], *, node: int = 0, ahead: float = 0.0, unix: float = UNIX
) -> None:
    """The file of a process on a node whose monotonic clock is at `ahead` at second 0."""
    owner = {
        "role": role, "node": node, "host": f"n{node}", "pid": 100 + node, "clock": f"clock-{node}",
        "monotonic": ahead, "unix": unix,
    }  # fmt: skip
    written = [
        [name, track, round((start + ahead) * 1e6), round((end + ahead) * 1e6), facts]
        for name, track, start, end, facts in spans
    ]
    path = folder / FOLDER / f"{role}.0.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(owner | {"spans": written}) + "\n")


def episode(ticket: int, index: int, start: float, parts: Sequence[tuple[str, float]], outcome: str) -> list[Span]:
    """The spans of an episode that consists of `parts`, one after the other."""
    track, now, spans = f"episode {ticket}.{index}", start, []
    step = 0
    for name, seconds in parts:
        step += name == "generate"
        facts: dict[str, Any] = {"step": step} if name in ("generate", "act") else {}
        if name == "act":
            facts |= {"kind": "left_click", "acting": seconds / 8, "settling": seconds / 4, "capturing": seconds / 2}
        spans.append((name, track, now, now + seconds, facts))
        now += seconds
    whole = {"ticket": ticket, "index": index, "epoch": 0, "outcome": outcome}
    return [("episode", track, start, now, whole), *spans]


def write_run(directory: Path, ahead: float = 0.0) -> Config:
    """A run of two updates with known answers; the worker's node has a clock that is `ahead` of the trainer's.

    Second   0        10          20            27    30        34  35
    trainer  update 1  | wait for groups, 15 s      | train, 8 s | exchange, 2 s
    worker             | ticket 7: claimed at 12, episode 7.1 ends last, at 25
    """
    sizes = ("rollout.groups_in_flight=2", "rollout.group_size=2", "trainer.groups_per_update=1")
    config = make_run(directory, "tracking.timeline=true", *sizes)
    folder = config.run_folder
    write_process(
        folder,
        "trainer-0",
        [
            ("update", "", 0.0, 10.0, {"version": 1, "tickets": [[0, 3]]}),
            ("wait for groups", "", 10.0, 25.0, {"version": 2}),
            ("train", "", 25.0, 33.0, {"version": 2}),
            ("pack", "", 25.0, 26.0, {}),
            ("forward and backward", "", 26.0, 32.0, {"microbatches": 4}),
            ("optimizer", "", 32.0, 33.0, {}),
            ("weight exchange", "", 33.0, 35.0, {"version": 2}),
            ("update", "", 10.0, 35.0, {"version": 2, "tickets": [[0, 7]]}),
        ],
    )
    parts = [("wait for browser", 1.0), ("reset", 2.0), ("generate", 3.0), ("act", 1.0), ("generate", 4.0)]
    spans = [
        ("wait for tickets", "worker", 10.0, 12.0, {}),
        ("ticket", "ticket 7", 12.0, 25.0, {"ticket": 7, "epoch": 0}),
        *episode(7, 0, 12.0, [("reset", 2.0), ("generate", 2.0), ("judge", 1.0)], "browser_crashed"),
        *episode(7, 1, 12.0, [*parts, ("judge", 1.5)], "failure"),
        ("write to ring", "ticket 7", 24.5, 25.0, {}),
        ("pause for weights", "engine", 34.0, 35.0, {"version": 2}),
        ("ticket", "ticket 8", 35.0, 40.0, {"ticket": 8, "epoch": 0}),
    ]
    write_process(folder, "rollout-0", spans, node=1, ahead=ahead)
    return config
