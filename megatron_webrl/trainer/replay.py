"""Successes of earlier versions, for RAFT to imitate again: record files of the run, one a version."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import torch

from megatron_webrl.config import Config
from megatron_webrl.ring.record import decode
from megatron_webrl.ring.record_file import count_records, read_record_file
from megatron_webrl.trainer import group_files
from megatron_webrl.trainer.parallel import broadcast_object
from megatron_webrl.types import Group

log = logging.getLogger(__name__)


def chance(age: int, versions: int, power: float) -> float:
    """With which probability a success of `age` versions ago (1..versions) is drawn: 1 for the latest, then less.

    ((versions + 1 - age) / versions)^power
    """
    return float(((versions + 1 - age) / versions) ** power)


class Replay:
    """Life: per update `draw` before it and `add` after it, on every rank. Without raft_versions both do nothing.

    The files are written by the first rank and outlive the process: a resumed run draws what its earlier life stored
    up to its checkpoint, and writes later versions anew. Files stay for raft_versions and two checkpoint intervals;
    a resume from further back draws from what is left. Episodes were counted when they were trained first.
    """

    def __init__(self, config: Config) -> None:
        loss = config.trainer.loss
        self.folder, self.seed = config.run_folder / "replay", config.run.seed
        self.versions, self.power = loss.raft_versions, loss.raft_power
        self.kept = loss.raft_versions + 2 * config.trainer.checkpoint.every

    def draw(self, version: int) -> list[Group]:
        """Successes of the versions before `version`, each trajectory a group of its own. Collective.

        The first rank draws. Raises RecordError for a damaged file, OSError where a rank does not see it.
        """
        if not self.versions:
            return []
        chosen = self._choose(version) if torch.distributed.get_rank() == 0 else {}
        groups = []
        for earlier, places in broadcast_object(chosen).items():
            wanted = set(places)
            for place, record in enumerate(read_record_file(group_files.path_of(self.folder, earlier))):
                if place in wanted:
                    trajectory = decode(record, copy=True)
                    groups.append(Group(trajectory.ticket, (trajectory,)))
        return groups

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Store the successes that the update from `version` on was trained on; delete what is too old."""
        if not self.versions or torch.distributed.get_rank() != 0:
            return
        successes = (t for group in groups for t in group.trajectories if t.trainable and t.reward > 0)
        group_files.write(group_files.path_of(self.folder, version), successes)
        for path in self.folder.iterdir():
            stored = group_files.version_of(path)
            if stored is not None and stored <= version - self.kept:
                path.unlink()

    def _choose(self, version: int) -> dict[int, list[int]]:
        """Version -> places of the records that are drawn."""
        generator = random.Random(f"replay/{self.seed}/{version}")
        chosen = {}
        for age in range(1, min(self.versions, version) + 1):
            path = group_files.path_of(self.folder, version - age)
            if not path.is_file():
                log.warning("%s is missing: successes of version %d are not imitated again", path, version - age)
                continue
            likely = chance(age, self.versions, self.power)
            chosen[version - age] = [n for n in range(count_records(path)) if generator.random() < likely]
        return chosen
