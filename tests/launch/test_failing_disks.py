"""Whole jobs whose file systems are full or fail for a while, one way after the other."""

from __future__ import annotations

import errno
import re
import signal
import time

import pytest

from megatron_webrl.track import episodes, events
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from tests.failing_files import STALL, FailingFiles
from tests.launch.whole_jobs import Job, assert_nothing_left

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

HEARTBEAT_TIMEOUT_SECONDS = 10
STALL_SECONDS = 15
START_SECONDS = 600
COMPLETE_AGAIN = "updates.jsonl can be written again, and is complete"


def reported_update(job: Job) -> int:
    """The newest update that the launcher has shown; its figures may not be on disk."""
    return max((int(number) for number in re.findall(r"update (\d+): ", job.output())), default=0)


def trainer_log(job: Job) -> str:
    return (job.run_folder / "logs" / "trainer-0.log").read_text()


def test_a_job_outlives_a_full_disk_and_a_failing_run_folder_and_resumes(job: Job) -> None:
    """A smaller test could not show that no process of a job depends on the run's folder, its log files among it."""
    disk = FailingFiles(job.run_folder, job.folder)
    settings = (
        "trainer.checkpoint.every=1",
        f"run.heartbeat_timeout_seconds={HEARTBEAT_TIMEOUT_SECONDS}",
        "tracking.keep_records=true",
        "evaluation.every=2",
        "evaluation.episodes=2",
    )
    job.start("trainer.updates=100", *settings, environment=disk.environment)
    job.until(lambda: len(job.updates()) >= 2, "two updates", START_SECONDS)
    for error in (errno.ENOSPC, errno.EROFS, errno.EIO):
        last = len(job.updates())
        with disk.failing(error):
            job.until(lambda last=last: reported_update(job) >= last + 2, f"an update with {errno.errorcode[error]}")
        job.until(lambda last=last: len(job.updates()) > last, "updates that are written late")
    last = len(job.updates())
    with disk.failing(STALL):
        time.sleep(STALL_SECONDS)
    job.until(lambda: len(job.updates()) > last + 1, "updates after the stall")
    assert not [event for event in events.read_events(job.run_folder) if event.event == events.RESTARTED]
    assert job.process is not None
    with disk.failing(errno.EROFS):
        last = len(job.updates())
        job.until(lambda: reported_update(job) >= last + 2, "an update that is not written")
    job.process.send_signal(signal.SIGINT)
    assert job.wait(300) == 130, job.output()
    assert_nothing_left(job)
    assert trainer_log(job).count(COMPLETE_AGAIN) >= 2
    saved = find_latest_checkpoint(job.run_folder)
    assert saved is not None
    version = int(saved.name.removeprefix("version-"))
    assert version > last

    job.start(f"trainer.updates={version + 1}", *settings, "run.resume=true")
    assert job.wait(400) == 0, job.output()
    assert [update["version"] for update in job.updates()] == list(range(1, version + 2))
    summary = job.summary()
    assert summary["accounting"]["matches"]
    closed = summary["accounting"]["trained"] + sum(summary["accounting"]["dropped"].values())
    assert len(episodes.read_lines(job.run_folder)) == closed
    newest = find_latest_checkpoint(job.run_folder)
    assert newest == job.run_folder / "checkpoints" / f"version-{version + 1:06d}"
