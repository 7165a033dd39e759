"""Record files of updates, and the replay of earlier versions' successes from them for RAFT.

version-000003.records, version-000003.node-1.records: trajectories that the update from policy version 3 took from the
rings of nodes 0 and 1.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import (
    RecordFileWriter,
    count_records,
    decode_trajectory,
    encode_trajectory,
    read_record_file,
)
from megatron_webrl.trainer.multi_node.exchange import RecordExchange
from megatron_webrl.types import Group, Trajectory
from megatron_webrl.util.atomic_file import continue_without

log = logging.getLogger(__name__)

_FILE = re.compile(r"version-(\d{6,})(?:\.node-(\d+))?\.records")
DECAY_POWER = 1.0  # exponent by which the replay probability falls with age


def replay_probability(age: int, max_age: int, decay_power: float) -> float:
    """Probability of replaying a success that is `age` versions old (1..max_age): 1 for the latest."""
    return float(((max_age + 1 - age) / max_age) ** decay_power)


class ReplayBuffer:
    """Stores and samples successes. Call `sample` before each update and `add` after it, on every rank.

    Without replay_versions both do nothing. A resumed run samples the versions up to its checkpoint and overwrites
    later ones. One rank per node writes the successes of its ring, and all ranks sample them. Files stay for
    replay_versions and two checkpoint intervals; a resume from further back samples what remains. Episodes count when
    first trained.
    """

    def __init__(self, config: Config, exchange: RecordExchange, decay_power: float = DECAY_POWER) -> None:
        self.exchange, loss = exchange, config.trainer.loss
        self.folder, self.seed = config.run_folder / "replay", config.run.seed
        self.max_age, self.decay_power = loss.oldest_replayed, decay_power
        self.retained_versions = loss.oldest_replayed + 2 * config.trainer.checkpoint.every

    def sample(self, version: int) -> list[Group]:
        """Earlier versions' successes, each a group. Collective. Raises RecordError (damaged file), OSError."""
        if not self.max_age:
            return []
        sampled = []
        for path, places in self._choose(version):
            for place, record in enumerate(read_record_file(path)):
                if place in places:
                    sampled.append(decode_trajectory(record, copy=True))
        trajectories = self.exchange.all_gather_trajectories(sampled)
        return [Group(trajectory.ticket, (trajectory,)) for trajectory in trajectories]

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Store the successes of the update from policy `version`, and delete files that are too old."""
        if not self.max_age or not self.exchange.topology.is_node_leader:
            return
        successes = (t for t in self.exchange.trajectories_to_store(groups) if t.trainable and t.reward > 0)
        path = group_file_path(self.folder, version, self.exchange.topology.node)
        with continue_without(str(path)):
            write_trajectories(path, successes)
        for stored, other in self._files():
            if stored <= version - self.retained_versions or (stored == version and other != path):
                other.unlink()

    def _choose(self, version: int) -> list[tuple[Path, set[int]]]:
        """This node's files, latest version first, and the sampled places of their records."""
        node = self.exchange.topology.node
        generator = random.Random(f"replay/{self.seed}/{version}" + (f"/{node}" if node else ""))
        chosen, files = [], self._files()
        for age in range(1, min(self.max_age, version) + 1):
            paths = [path for stored, path in files if stored == version - age]
            if not paths:
                path = group_file_path(self.folder, version - age, node)
                log.warning("%s is missing: successes of version %d are not replayed", path, version - age)
            probability = replay_probability(age, self.max_age, self.decay_power)
            for path in paths:
                chosen.append((path, {n for n in range(count_records(path)) if generator.random() < probability}))
        return chosen

    def _files(self) -> list[tuple[int, Path]]:
        topology = self.exchange.topology
        return list_group_files(self.folder, topology.node, topology.node_count)


def group_file_path(folder: Path, version: int, node: int = 0) -> Path:
    """The file of the trajectories that the update from policy `version` took from the ring of `node`."""
    return folder / (f"version-{version:06d}" + (f".node-{node}" if node else "") + ".records")


def list_group_files(folder: Path, node: int = 0, nodes: int = 1) -> list[tuple[int, Path]]:
    """Sorted versions and paths of the files that a node reads: its own, and a share of those of nodes now gone."""
    files = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE.fullmatch(path.name)
        if match and int(match[2] or 0) % nodes == node:
            files.append((int(match[1]), int(match[2] or 0), path))
    return [(version, path) for version, _, path in sorted(files)]


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Store trajectories, one in memory at a time. The file gets its name when it is complete. Raises OSError."""
    with RecordFileWriter(path) as file:
        for trajectory in trajectories:
            file.write(encode_trajectory(trajectory))
