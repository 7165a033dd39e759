"""Successes of earlier versions, for RAFT to imitate again: record files of the run, one a version."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import decode_trajectory
from megatron_webrl.ring.record_file import count_records, read_record_file
from megatron_webrl.trainer.data import group_files
from megatron_webrl.trainer.exchange.record_exchange import RecordExchange
from megatron_webrl.types import Group

log = logging.getLogger(__name__)


def replay_probability(age: int, versions: int, power: float) -> float:
    """With which probability a success of `age` versions ago (1..versions) is drawn: 1 for the latest, then less.

    ((versions + 1 - age) / versions)^power
    """
    return float(((versions + 1 - age) / versions) ** power)


class ReplayBuffer:
    """Life: per update `draw` before it and `add` after it, on every rank. Without raft_versions both do nothing.

    The files, one a version and node, outlive the process: a resumed run draws what its earlier life stored
    up to its checkpoint, and writes later versions anew. On each node one rank writes what came from its ring, and all
    draw from that. Files stay for raft_versions and two checkpoint intervals;
    a resume from further back draws from what is left. Episodes were counted when they were trained first.
    """

    def __init__(self, config: Config, rings: RecordExchange | None = None) -> None:
        """`rings`: where the ranks are; None: all on one node."""
        self.exchange = rings or RecordExchange()
        loss = config.trainer.loss
        self.folder, self.seed = config.run_folder / "replay", config.run.seed
        self.max_age, self.decay_power = loss.raft_versions, loss.raft_power
        self.retained_versions = loss.raft_versions + 2 * config.trainer.checkpoint.every

    def sample(self, version: int) -> list[Group]:
        """Successes of the versions before `version`, each trajectory a group of its own. Collective.

        One rank of a node draws. Raises RecordError for a damaged file, OSError where a rank does not see it.
        """
        if not self.max_age:
            return []
        drawn = []
        for name, places in (
            self.exchange.broadcast_on_node(self._choose(version) if self.exchange.writes_node_files else None) or ()
        ):
            wanted = set(places)
            for place, record in enumerate(read_record_file(self.folder / name)):
                if place in wanted:
                    drawn.append(decode_trajectory(record, copy=True))
        return [Group(trajectory.ticket, (trajectory,)) for trajectory in self.exchange.all_gather_trajectories(drawn)]

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Store the successes that the update from `version` on was trained on; delete what is too old."""
        if not self.max_age or not self.exchange.writes_node_files:
            return
        successes = (t for t in self.exchange.trajectories_to_store(groups) if t.trainable and t.reward > 0)
        path = group_files.group_file_path(self.folder, version, self.exchange.topology.node)
        group_files.write_trajectories(path, successes)
        for stored, other in self._files():
            if stored <= version - self.retained_versions or (stored == version and other != path):
                other.unlink()

    def _choose(self, version: int) -> list[tuple[str, list[int]]]:
        """Names of this node's files, the latest version first, and places of the records that are drawn."""
        node = self.exchange.topology.node
        generator = random.Random(f"replay/{self.seed}/{version}" + (f"/{node}" if node else ""))
        chosen, files = [], self._files()
        for age in range(1, min(self.max_age, version) + 1):
            paths = [path for stored, path in files if stored == version - age]
            if not paths:
                path = group_files.group_file_path(self.folder, version - age, node)
                log.warning("%s is missing: successes of version %d are not imitated again", path, version - age)
            likely = replay_probability(age, self.max_age, self.decay_power)
            for path in paths:
                places = [n for n in range(count_records(path)) if generator.random() < likely]
                chosen.append((path.name, places))
        return chosen

    def _files(self) -> list[tuple[int, Path]]:
        nodes = self.exchange.topology
        return group_files.list_group_files(self.folder, nodes.node, nodes.node_count)
