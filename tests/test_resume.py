"""A run that is killed over and over trains what an undisturbed one would: no ticket lost, skipped or trained twice."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter, defaultdict

import pytest

from megatron_webrl.config import load
from megatron_webrl.tasks.registry import make_source
from megatron_webrl.tracking import episode_log
from tests.test_job import Job, assert_nothing_left, job, owned

__all__ = ["job"]  # the fixture

KILLS, UPDATES, GROUPS, GROUP_SIZE, STALENESS = 20, 100, 2, 2, 1
LIMIT = 300.0


def versions(job: Job) -> int:
    """Updates that are in a complete checkpoint."""
    latest = job.run_folder / "checkpoints" / "latest"
    return int(latest.read_text().strip().rpartition("-")[2]) if latest.is_file() else 0


def kill_at_random(job: Job, choose: random.Random) -> None:
    """Wait for up to two more checkpoints and a little longer, then kill trainer and worker, or the launcher."""
    assert job.process is not None
    wanted = versions(job) + choose.randrange(3)
    job.until(lambda: job.role("trainer-0") and job.role("rollout-0"), "both roles", LIMIT)
    job.until(lambda: versions(job) >= wanted, f"checkpoint {wanted}", LIMIT)
    moment = time.monotonic() + choose.uniform(0, 5)
    while time.monotonic() < moment and job.process.poll() is None:
        time.sleep(0.01)
    for victim in [job.process.pid] if choose.random() < 0.3 else [job.role("trainer-0"), job.role("rollout-0")]:
        if isinstance(victim, int):
            job.process.send_signal(signal.SIGKILL)
        elif victim is not None:
            victim.kill()
    job.wait(90)
    gone = time.monotonic() + 60
    while owned(job.process.pid):
        assert time.monotonic() < gone, f"left: {owned(job.process.pid)}"
        time.sleep(0.1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_twenty_kills_lose_no_group_train_none_twice_and_skip_no_task(job: Job) -> None:
    choose = random.Random(0)
    overrides = [f"trainer.updates={UPDATES}", "trainer.checkpoint.every=1", "run.trainer_restarts=0"]
    for _ in range(KILLS):
        assert versions(job) < UPDATES - 1, "it is over before the last kill"
        resume = [f"run.resume={'true' if versions(job) else 'false'}"]
        job.start(*overrides, *resume)
        kill_at_random(job, choose)
    job.start(*overrides, "run.resume=true")
    assert job.wait(LIMIT * 4) == 0, job.output()
    assert_nothing_left(job)

    summary = job.summary()
    assert summary["accounting"]["matches"], summary["accounting"]
    assert [update["version"] for update in summary["updates"]] == list(range(1, UPDATES + 1))
    lines = episode_log.read(job.run_folder)
    assert len(lines) == summary["accounting"]["trained"] + sum(summary["accounting"]["dropped"].values())

    kept = [line for line in lines if line["fate"] != "duplicate"]
    assert max(Counter((line["ticket"], line["index"]) for line in kept).values()) == 1  # none twice
    trained: dict[int, set[int]] = defaultdict(set)
    for line in kept:
        if line["fate"] == episode_log.TRAINED:
            trained[line["version"]].add(line["ticket"])
    assert {version: len(tickets) for version, tickets in trained.items()} == dict.fromkeys(range(UPDATES), GROUPS)

    # Tickets are closed in about their order: what is open at the end is what could be in flight then.
    closed = {line["ticket"] for line in kept}
    skipped = set(range(max(closed) + 1)) - closed
    assert len(skipped) <= (STALENESS + 1) * GROUPS
    config = load(job.run_folder / "config.yaml", ["run.resume=false"])
    source = make_source(config.tasks)
    try:
        wanted = {ticket: source.task(config.run.seed, ticket).id for ticket in closed}
    finally:
        source.close()
    assert {line["ticket"]: line["task"] for line in kept} == wanted
