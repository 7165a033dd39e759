"""Stored episodes to judge: the records of a run, or record files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_webrl.config.schema import Config, RunConfig
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.judge.outcome import ANSWER, STEPS_EXHAUSTED
from megatron_webrl.ring.errors import RecordError
from megatron_webrl.ring.record import decode_trajectory
from megatron_webrl.ring.record_file import count_records, read_record_file
from megatron_webrl.types import TRAINABLE_OUTCOMES, Trajectory

RECORDS = "*.records"


@dataclass(frozen=True)
class StoredEpisodes:
    """Record files, and the folder of the run that wrote them, if it was one."""

    files: tuple[Path, ...]
    run: Path | None = None

    @classmethod
    def find(cls, name: str) -> StoredEpisodes:
        """The episodes of a record file, a folder of them, a run's folder, or a run in runs/. Raises ConfigError."""
        for path in (Path(name), Path(RunConfig().directory) / name):
            if path.is_file():
                return cls((path,))
            if (path / "config.yaml").is_file():
                records = Config(run=RunConfig(name=path.name, directory=str(path.parent))).records_folder
                if not list(records.glob(RECORDS)):
                    raise ConfigError(f"{path} has stored no episodes in {records}; set tracking.keep_records=true")
                return cls(tuple(sorted(records.glob(RECORDS))), path)
            if files := sorted(path.glob(RECORDS)):
                return cls(tuple(files))
        raise ConfigError(f"{name} is no record file, folder of record files, or run")

    def count(self) -> int:
        """The number of episodes. Raises ConfigError for a damaged file."""
        try:
            return sum(map(count_records, self.files))
        except (RecordError, OSError) as error:
            raise ConfigError(str(error)) from error

    def read(self) -> Iterator[tuple[str, Trajectory]]:
        """A key of each episode, unique among the files, and the episode. Raises ConfigError for a damaged file."""
        for path in self.files:
            try:
                for number, record in enumerate(read_record_file(path)):
                    yield f"{path.name}:{number}", with_end_reason(decode_trajectory(record, copy=True))
            except (RecordError, OSError) as error:
                raise ConfigError(f"{path}: {error}") from error


def with_end_reason(trajectory: Trajectory) -> Trajectory:
    """The episode; its end is inferred from its outcome where it was not stored, as in demonstrations."""
    if trajectory.end_reason:
        return trajectory
    end = ANSWER if trajectory.answer is not None else STEPS_EXHAUSTED
    return replace(trajectory, end_reason=end if trajectory.outcome in TRAINABLE_OUTCOMES else trajectory.outcome)
