"""Benchmark of recording and replay: the same episodes live, recorded, and replayed several times without a network.

    python -m tools.bench.replay [--quick] [--episodes N] [--repeats N] [--json FILE] [--leave-out PART ...]

Half of the episodes are scripted ones of the sites, half are on a web site of this machine whose every response is
different (tools/bench/browsers/changing_site.py). The servers have ended before the replays begin, and the replays run
in a network namespace with nothing but loopback, where the system permits it. A step is pixel-identical if its
screenshot has the same bytes as in the recording. `--leave-out` leaves clock and random numbers (script) or animations
(stillness) as they are in recording and replay, or clock and random numbers in the recording alone (recorded-script).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tools.arguments import bounded_number, make_bench_parser, write_json
from tools.bench.browsers.replayed_episodes import (
    EPISODES_FILE,
    LEAVE_OUT,
    PlayedEpisode,
    PlayedRun,
    browser_settings,
    leave_out,
    play,
)

QUICK_EPISODES = 6


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = make_bench_parser(__doc__, f"{QUICK_EPISODES} episodes, replayed once")
    parser.add_argument("--episodes", type=bounded_number(int, 1), default=100, help="default: 100")
    parser.add_argument("--repeats", type=bounded_number(int, 1), default=3, help="replays; default: 3")
    parser.add_argument("--sessions", type=bounded_number(int, 1), default=2, help="at a time; default: 2")
    parser.add_argument("--leave-out", nargs="*", default=[], choices=LEAVE_OUT)
    options = parser.parse_args(arguments)
    episodes, repeats = (QUICK_EPISODES, 1) if options.quick else (options.episodes, options.repeats)
    leave_out(options.leave_out, recording=True)
    with tempfile.TemporaryDirectory(prefix="webrl-replay-bench-") as folder:
        figures = measure(Path(folder), episodes, repeats, options.sessions, options.leave_out)
    show(figures)
    write_json(options.json, figures)


def measure(folder: Path, episodes: int, repeats: int, sessions: int, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """The figures of all runs. Raises RuntimeError if an episode fails while it is recorded."""
    numbers = range(episodes)
    live = asyncio.run(play(browser_settings(), numbers, sessions))
    recorded = asyncio.run(play(browser_settings(record=str(folder)), numbers, sessions))
    if recorded.failed:
        raise RuntimeError(f"{len(recorded.failed)} episodes were not recorded, first: {recorded.failed[0]}")
    replays, not_isolated = replay_apart(folder, recorded, repeats, sessions, left_out)
    size = sum(file.stat().st_size for file in folder.glob("*.zip"))
    return {
        "episodes": episodes, "steps": sum(len(each.seen) for each in recorded.episodes), "sessions": sessions,
        "left_out": list(left_out), "machine": f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}",
        "live_seconds": live.seconds, "recording_seconds": recorded.seconds, "recordings_mib": size / 2**20,
        "not_isolated": not_isolated, "replays": [_compare(recorded, replay, live.seconds) for replay in replays],
    }  # fmt: skip


def replay_apart(
    folder: Path, recorded: PlayedRun, repeats: int, sessions: int, left_out: Sequence[str]
) -> tuple[list[PlayedRun], str]:
    """Replays in a process without a network; why it had one, or an empty text."""
    (folder / EPISODES_FILE).write_text(json.dumps([asdict(episode) for episode in recorded.episodes]))
    result = folder / "result.json"
    command = [sys.executable, "-m", "tools.bench.browsers.replayed_episodes", str(folder), str(result)]
    command += ["--repeats", str(repeats), "--sessions", str(sessions), "--leave-out", *left_out]
    subprocess.run(command, check=True)
    found = json.loads(result.read_text())
    runs = [
        PlayedRun(**run | {"episodes": [PlayedEpisode.from_json(each) for each in run["episodes"]]})
        for run in found["runs"]
    ]
    return runs, found["not_isolated"]


def _compare(recorded: PlayedRun, replay: PlayedRun, live_seconds: float) -> dict[str, Any]:
    again = {episode.number: episode for episode in replay.episodes}
    steps = rewards = 0
    different = []  # episode and step, 0 being the first screenshot
    for episode in recorded.episodes:
        replayed = again.get(episode.number)
        steps += len(episode.seen)
        rewards += replayed is not None and episode.reward == replayed.reward
        for step, seen in enumerate(episode.seen):
            if replayed is None or replayed.seen[step] != seen:
                different.append((episode.number, step))
    identical = steps - len(different)
    return {
        "steps": steps, "identical_steps": identical, "identical_share": identical / steps, "different": different,
        "equal_rewards": rewards, "failed": replay.failed, "requests_replayed": replay.replayed,
        "requests_not_recorded": replay.refused.get("not_recorded", 0),
        "requests_refused": sum(replay.refused.values()), "connections": replay.connections,
        "seconds": replay.seconds, "seconds_to_live": replay.seconds / live_seconds,
    }  # fmt: skip


def show(figures: dict[str, Any]) -> None:
    """Print the figures."""
    console = Console(width=130)
    console.print(
        f"{figures['episodes']} episodes, {figures['steps']} screenshots, {figures['sessions']} sessions: live "
        f"{figures['live_seconds']:.1f} s, recording {figures['recording_seconds']:.1f} s, "
        f"{figures['recordings_mib']:.1f} MiB; {figures['machine']}"
    )
    console.print(f"network of the replays: {figures['not_isolated'] or 'loopback only, no route'}")
    table = Table()
    columns = (
        "replay",
        "identical",
        "share",
        "rewards",
        "failed",
        "answered",
        "not recorded",
        "connections",
        "s",
        "to live",
    )
    for name in columns:
        table.add_column(name, justify="right")
    for number, run in enumerate(figures["replays"], 1):
        table.add_row(
            str(number), str(run["identical_steps"]), f"{run['identical_share']:.2%}", str(run["equal_rewards"]),
            str(len(run["failed"])), str(run["requests_replayed"]), str(run["requests_not_recorded"]),
            str(run["connections"]), f"{run['seconds']:.1f}", f"{run['seconds_to_live']:.2f}",
        )  # fmt: skip
        for message in run["failed"]:
            console.print(message, soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    main()
