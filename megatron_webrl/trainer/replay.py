"""Successes of earlier versions, for RAFT to imitate again: record files of the run, one a version."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.config import Config
from megatron_webrl.ring.record import decode
from megatron_webrl.ring.record_file import count_records, read_record_file
from megatron_webrl.trainer import group_files
from megatron_webrl.trainer.sharing import Together
from megatron_webrl.types import Group

log = logging.getLogger(__name__)


def chance(age: int, versions: int, power: float) -> float:
    """With which probability a success of `age` versions ago (1..versions) is drawn: 1 for the latest, then less.

    ((versions + 1 - age) / versions)^power
    """
    return float(((versions + 1 - age) / versions) ** power)


class Replay:
    """Life: per update `draw` before it and `add` after it, on every rank. Without raft_versions both do nothing.

    The files, one a version and node, outlive the process: a resumed run draws what its earlier life stored
    up to its checkpoint, and writes later versions anew. On each node one rank writes what came from its ring, and all
    draw from that. Files stay for raft_versions and two checkpoint intervals;
    a resume from further back draws from what is left. Episodes were counted when they were trained first.
    """

    def __init__(self, config: Config, rings: Together | None = None) -> None:
        """`rings`: where the ranks are; None: all on one node."""
        self.rings = rings or Together()
        loss = config.trainer.loss
        self.folder, self.seed = config.run_folder / "replay", config.run.seed
        self.versions, self.power = loss.raft_versions, loss.raft_power
        self.kept = loss.raft_versions + 2 * config.trainer.checkpoint.every

    def draw(self, version: int) -> list[Group]:
        """Successes of the versions before `version`, each trajectory a group of its own. Collective.

        One rank of a node draws. Raises RecordError for a damaged file, OSError where a rank does not see it.
        """
        if not self.versions:
            return []
        drawn = []
        for name, places in self.rings.agree(self._choose(version) if self.rings.stores else None) or ():
            wanted = set(places)
            for place, record in enumerate(read_record_file(self.folder / name)):
                if place in wanted:
                    drawn.append(decode(record, copy=True))
        return [Group(trajectory.ticket, (trajectory,)) for trajectory in self.rings.offer(drawn)]

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Store the successes that the update from `version` on was trained on; delete what is too old."""
        if not self.versions or not self.rings.stores:
            return
        successes = (t for t in self.rings.stored_here(groups) if t.trainable and t.reward > 0)
        path = group_files.path_of(self.folder, version, self.rings.nodes.node)
        group_files.write(path, successes)
        for stored, other in self._files():
            if stored <= version - self.kept or (stored == version and other != path):
                other.unlink()

    def _choose(self, version: int) -> list[tuple[str, list[int]]]:
        """Names of this node's files, the latest version first, and places of the records that are drawn."""
        node = self.rings.nodes.node
        generator = random.Random(f"replay/{self.seed}/{version}" + (f"/{node}" if node else ""))
        chosen, files = [], self._files()
        for age in range(1, min(self.versions, version) + 1):
            paths = [path for stored, path in files if stored == version - age]
            if not paths:
                path = group_files.path_of(self.folder, version - age, node)
                log.warning("%s is missing: successes of version %d are not imitated again", path, version - age)
            likely = chance(age, self.versions, self.power)
            for path in paths:
                places = [n for n in range(count_records(path)) if generator.random() < likely]
                chosen.append((path.name, places))
        return chosen

    def _files(self) -> list[tuple[int, Path]]:
        nodes = self.rings.nodes
        return group_files.files(self.folder, nodes.node, nodes.count)
