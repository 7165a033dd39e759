"""The starts of a job that Slurm starts again: where each begins, why the one before ended, and when it is enough.

launches.jsonl in the run's folder has a line for each start. A job that is started again and again without a newer
checkpoint has something that starting again does not cure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.tracking.latest_checkpoint import find_latest_checkpoint

LAUNCHES_FILE = "launches.jsonl"
UNKNOWN_OUTCOME = "no summary: it was killed, or a node was lost"


@dataclass(frozen=True)
class JobLaunch:
    """One start of a job."""

    slurm_job_id: str  # Slurm's number, which stays
    restart_count: int  # 0 for the first
    checkpoint: str | None  # the newest complete one at that moment, such as "version-000005"
    previous_outcome: str | None  # how the start before ended; None for the first
    time: float  # unix

    @property
    def message(self) -> str:
        """What people are told; empty for the first start."""
        if not self.restart_count:
            return ""
        where = f"goes on from {self.checkpoint}" if self.checkpoint else "begins anew, as no checkpoint is complete"
        return f"start {self.restart_count + 1} of job {self.slurm_job_id}, {where}; the start before ended: {self.previous_outcome}"


def latest_checkpoint_name(folder: Path) -> str | None:
    """The name of the newest complete checkpoint of a run."""
    newest = find_latest_checkpoint(folder)
    return newest.name if newest else None


def read_launches(folder: Path) -> list[JobLaunch]:
    """The starts of a run so far."""
    path = folder / LAUNCHES_FILE
    return [JobLaunch(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def write_launches(folder: Path, starts: Sequence[JobLaunch]) -> None:
    """Store them."""
    (folder / LAUNCHES_FILE).write_text("".join(json.dumps(asdict(start)) + "\n" for start in starts))


def record_launch(config: Config, environment: Mapping[str, str]) -> list[JobLaunch]:
    """The starts of a run with the one that begins; outside Slurm only those before.

    Raises ConfigError, and says so in summary.json, if the job was started run.max_requeues times again without a newer
    checkpoint.
    """
    folder = config.run_folder
    earlier = read_launches(folder)
    if "SLURM_JOB_ID" not in environment:
        return earlier
    job, restart = environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0"))
    before = None
    if restart:
        path = folder / "summary.json"
        before = json.loads(path.read_text())["outcome"] if path.is_file() else UNKNOWN_OUTCOME
    start = JobLaunch(job, restart, latest_checkpoint_name(folder), before, time.time())
    same = [each for each in earlier if (each.slurm_job_id, each.checkpoint) == (job, start.checkpoint)]
    if restart and len(same) > config.run.max_requeues:
        ends = "; ".join(filter(None, [*(each.previous_outcome for each in same), before]))
        words = (
            f"job {job} was started {len(same)} times at {start.checkpoint or 'no checkpoint'} and made no newer one "
            f"(run.max_requeues={config.run.max_requeues}); its starts ended: {ends}. Logs: {folder / 'logs'}"
        )
        from megatron_webrl.tracking import summary  # with it comes torch

        summary.write_summary(folder, f"failed: {words}", None)
        raise ConfigError(f"{words}. It goes on when it is submitted again with run.resume=true")
    return [*earlier, start]
