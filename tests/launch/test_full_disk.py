"""A whole job whose run folder has no room for a while."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_webrl.tracking import events
from tests.launch.whole_jobs import Job, assert_nothing_left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """The folder of all runs as a file system of 256 MiB."""
    folder = tmp_path / "runs"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs may be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_full_disk_under_the_run_folder_costs_no_process_and_no_update(
    small_disk: Path, tmp_path: Path, tiny_model: Path
):
    """A smaller test could not show that nothing else of a job, its log files among it, fails on a full disk."""
    job = Job(tmp_path, tiny_model, name="full")
    filler = small_disk / "filler"
    try:
        job.start("trainer.updates=8", "tracking.keep_records=true", "evaluation.every=4", "evaluation.episodes=2")
        job.until(lambda: len(job.updates()) >= 2, "two updates")
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(2**28))
        job.until(lambda: "update 6: " in job.output(), "three updates with a full disk")
        filler.unlink()
        assert job.wait(300) == 0, job.output()
        assert_nothing_left(job)
    finally:
        job.close()
    summary = job.summary()
    assert summary["accounting"]["matches"]
    assert [update["version"] for update in job.updates()] == list(range(1, 9))
    assert not [event for event in events.read_events(job.run_folder) if event.event == events.RESTARTED]
    log = (job.run_folder / "logs" / "trainer-0.log").read_text()
    assert "updates.jsonl cannot be written" in log
    assert "updates.jsonl can be written again, and is complete" in log
