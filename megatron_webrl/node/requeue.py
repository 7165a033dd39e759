"""The starts of a job that Slurm starts again: where each begins, why the one before ended, and when it is enough.

starts.jsonl in the run's folder has a line for each start. A job that is started again and again without a newer
checkpoint has something that starting again does not cure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_webrl.config import Config, ConfigError
from megatron_webrl.tracking.newest import newest_checkpoint

FILE = "starts.jsonl"
UNKNOWN = "no summary: it was killed, or a node was lost"


@dataclass(frozen=True)
class JobStart:
    """One start of a job."""

    job: str  # Slurm's number, which stays
    restart: int  # 0 for the first
    checkpoint: str | None  # the newest complete one at that moment, such as "version-000005"
    before: str | None  # how the start before ended; None for the first
    time: float  # unix

    @property
    def words(self) -> str:
        """What people are told; empty for the first start."""
        if not self.restart:
            return ""
        where = f"goes on from {self.checkpoint}" if self.checkpoint else "begins anew, as no checkpoint is complete"
        return f"start {self.restart + 1} of job {self.job}, {where}; the start before ended: {self.before}"


def checkpoint(folder: Path) -> str | None:
    """The name of the newest complete checkpoint of a run."""
    newest = newest_checkpoint(folder)
    return newest.name if newest else None


def read(folder: Path) -> list[JobStart]:
    """The starts of a run so far."""
    path = folder / FILE
    return [JobStart(**json.loads(line)) for line in path.read_text().splitlines()] if path.is_file() else []


def write(folder: Path, starts: Sequence[JobStart]) -> None:
    """Store them."""
    (folder / FILE).write_text("".join(json.dumps(asdict(start)) + "\n" for start in starts))


def begin(config: Config, environment: Mapping[str, str]) -> list[JobStart]:
    """The starts of a run with the one that begins; outside Slurm only those before.

    Raises ConfigError, and says so in summary.json, if the job was started run.requeues times again without a newer
    checkpoint.
    """
    folder = config.run_folder
    earlier = read(folder)
    if "SLURM_JOB_ID" not in environment:
        return earlier
    job, restart = environment["SLURM_JOB_ID"], int(environment.get("SLURM_RESTART_COUNT", "0"))
    before = None
    if restart:
        path = folder / "summary.json"
        before = json.loads(path.read_text())["outcome"] if path.is_file() else UNKNOWN
    start = JobStart(job, restart, checkpoint(folder), before, time.time())
    same = [each for each in earlier if (each.job, each.checkpoint) == (job, start.checkpoint)]
    if restart and len(same) > config.run.requeues:
        ends = "; ".join(filter(None, [*(each.before for each in same), before]))
        words = (
            f"job {job} was started {len(same)} times at {start.checkpoint or 'no checkpoint'} and made no newer one "
            f"(run.requeues={config.run.requeues}); its starts ended: {ends}. Logs: {folder / 'logs'}"
        )
        from megatron_webrl.tracking import summary  # with it comes torch

        summary.write(folder, f"failed: {words}", None)
        raise ConfigError(f"{words}. It goes on when it is submitted again with run.resume=true")
    return [*earlier, start]
