"""Launches of a job that Slurm requeues: the checkpoint of each, how the previous one ended, and the limit on them.

launches.jsonl has a line for each. A job fails after run.max_requeues requeues without a newer checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.util import atomic_file

LAUNCHES_FILE = "launches.jsonl"
UNKNOWN_OUTCOME = "without a summary: it was killed, or a node was lost"


@dataclass(frozen=True)
class JobLaunch:
    slurm_job_id: str  # a requeue keeps it
    restart_count: int  # 0 for the first launch
    checkpoint: str | None  # the newest complete checkpoint at launch, such as "version-000005"
    previous_outcome: str | None  # of the previous launch; None for the first
    time: float  # unix time, seconds

    @property
    def message(self) -> str:
        """A line for the log; empty for the first launch."""
        if not self.restart_count:
            return ""
        source = f"resuming from {self.checkpoint}" if self.checkpoint else "starting over, no checkpoint is complete"
        number = f"launch {self.restart_count + 1} of job {self.slurm_job_id}"
        return f"{number}, {source}; the previous launch ended: {self.previous_outcome}"


def latest_checkpoint_name(folder: Path) -> str | None:
    """Name of the newest complete checkpoint of a run."""
    newest = find_latest_checkpoint(folder)
    return newest.name if newest else None


def read_launches(folder: Path) -> list[JobLaunch]:
    path = folder / LAUNCHES_FILE
    return [JobLaunch(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def write_launches(folder: Path, launches: Sequence[JobLaunch]) -> None:
    atomic_file.write_text(folder / LAUNCHES_FILE, "".join(json.dumps(asdict(launch)) + "\n" for launch in launches))


def record_launch(config: Config, environment: Mapping[str, str]) -> list[JobLaunch]:
    """The launches of a run with the current one; outside Slurm only the recorded ones.

    Raises ConfigError, and writes it to summary.json, after run.max_requeues requeues without a newer checkpoint.
    """
    folder = config.run_folder
    earlier = read_launches(folder)
    if "SLURM_JOB_ID" not in environment:
        return earlier
    job, restart = environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0"))
    own = [each for each in earlier if each.slurm_job_id == job]
    previous_outcome = UNKNOWN_OUTCOME if restart else None
    if own:
        path = folder / "summary.json"
        previous_outcome = json.loads(path.read_text())["outcome"] if path.is_file() else UNKNOWN_OUTCOME
    checkpoint = latest_checkpoint_name(folder) if own or config.run.resume else None  # otherwise an earlier run's
    launch = JobLaunch(job, restart, checkpoint, previous_outcome, time.time())
    same = [each for each in own if each.checkpoint == checkpoint]
    if restart and len(same) > config.run.max_requeues:
        outcomes = "; ".join(filter(None, [*(each.previous_outcome for each in same), previous_outcome]))
        reason = (
            f"job {job} was launched {len(same)} times from {launch.checkpoint or 'no checkpoint'} and made no newer "
            f"one (run.max_requeues={config.run.max_requeues}); its launches ended: {outcomes}. Logs: {folder / 'logs'}"
        )
        from megatron_webrl.track import summary  # imports torch

        summary.write_summary(folder, f"failed: {reason}", None)
        way = "Submit it again" if config.evaluation.only else "To resume, submit it again with run.resume=true"
        raise ConfigError(f"{reason}. {way}")
    return [*earlier, launch]
