"""Drill: the histories of a long run cost as much for its last update as for its first.

    python -m tools.drills.histories [--quick] [--json FILE]

Writes the lines of 20,000 updates with 16 episodes each (2,000 in the short form) through the classes of the trainer,
and follows them as a launcher does. Counts the bytes that the process reads and writes for an update, and its CPU time.
Then resumes from a checkpoint ten updates before the end.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_webrl.track import episodes, summary
from megatron_webrl.track.episodes import EpisodeLog
from tests.trajectories import trajectory
from tools.drills.report import Findings, run

EPISODES = 16  # of an update
EXTRA_METRICS = 120  # of an update line
GOAL_RATIO = 1.1  # bytes of the last updates over those of the first ones
GOAL_TIME_RATIO = 2.0  # of median CPU seconds
GOAL_RESUME_BYTES = 2**20  # read and written by a resume, whatever the length
ROLLED_BACK = 10  # updates


def measure(quick: bool) -> Findings:
    """Write, follow and resume the histories of a run."""
    updates, findings = 2000 if quick else 20_000, Findings()
    episode = trajectory(0, 0, steps=4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        history, log, tail = summary.open_updates(folder), EpisodeLog(folder, 0), summary.tail_updates(folder)
        seconds, sizes, checkpoint_size, followed = [], [], 0, 0
        for version in range(1, updates + 1):
            before, started = _bytes_moved(), time.process_time()
            for index in range(EPISODES):
                log.add(replace(episode, ticket=version, index=index), None, version)
            history.append(_update(version))
            followed += len(tail.poll())
            seconds.append(time.process_time() - started)
            sizes.append(_bytes_moved() - before)
            if version == updates - ROLLED_BACK:
                history.sync()
                log.history.sync()
                checkpoint_size = log.size
        history.close()
        log.close()
        window = updates // 10
        first, last = statistics.mean(sizes[:window]), statistics.mean(sizes[-window:])
        early, late = statistics.median(seconds[:window]), statistics.median(seconds[-window:])
        before, started = _bytes_moved(), time.process_time()
        kept = updates - ROLLED_BACK
        history, log = summary.open_updates(folder, kept), EpisodeLog(folder, kept * EPISODES, checkpoint_size)
        resume_seconds, resume_bytes = time.process_time() - started, _bytes_moved() - before
        history.close()
        log.close()
        findings.figures = {
            "updates": updates,
            "MiB of updates.jsonl": (folder / summary.UPDATES_FILE).stat().st_size / 2**20,
            "MiB of episodes.jsonl": (folder / episodes.FILE).stat().st_size / 2**20,
            "KiB moved for one of the first updates": first / 1024,
            "KiB moved for one of the last updates": last / 1024,
            "CPU ms for one of the first updates": 1000 * early,
            "CPU ms for one of the last updates": 1000 * late,
            "KiB moved by a resume": resume_bytes / 1024,
            "CPU ms for a resume": 1000 * resume_seconds,
        }
        findings.expect(followed == updates, f"a reader that followed saw {followed} of {updates} updates")
        findings.expect(last < GOAL_RATIO * first, f"an update moves {first:.0f} bytes at first, {last:.0f} at last")
        findings.expect(
            late < GOAL_TIME_RATIO * early, f"an update takes {early:.6f} CPU seconds at first, {late:.6f} s at last"
        )
        findings.expect(resume_bytes < GOAL_RESUME_BYTES, f"a resume moves {resume_bytes} bytes")
        versions = [update["version"] for update in summary.read_updates(folder)]
        findings.expect(versions == list(range(1, kept + 1)), "updates after the checkpoint were not cut off")
        lines = len(episodes.read_lines(folder))
        findings.expect(lines == kept * EPISODES, f"{lines} episodes are left of {kept * EPISODES}")
    return findings


def _update(version: int) -> dict[str, Any]:
    return {
        "version": version,
        "groups": 8,
        "finished_at": float(version),
        "seconds": {"rollout": 1.0, "train": 2.0, "sync": 0.5, "wait": 3.0, "image_wait": 0.0},
        "extra": {f"some/metric_of_an_update_{number}": 0.123456789 * number for number in range(EXTRA_METRICS)},
    }


def _bytes_moved() -> int:
    """Bytes that this process has read and written by system calls so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"]) + int(fields["wchar"])


if __name__ == "__main__":
    sys.exit(run("histories", __doc__.split("\n")[0], measure))
