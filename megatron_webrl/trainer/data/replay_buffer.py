"""Replay of earlier versions' successes for RAFT, stored in record files of the run."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import count_records, decode_trajectory, read_record_file
from megatron_webrl.trainer.data import group_files
from megatron_webrl.trainer.multi_node.exchange import RecordExchange
from megatron_webrl.types import Group
from megatron_webrl.util.atomic_file import continue_without

log = logging.getLogger(__name__)

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

    def __init__(
        self, config: Config, exchange: RecordExchange | None = None, decay_power: float = DECAY_POWER
    ) -> None:
        """`exchange`: connects the ranks of all nodes; None: all are on one node."""
        self.exchange = exchange or RecordExchange()
        loss = config.trainer.loss
        self.folder, self.seed = config.run_folder / "replay", config.run.seed
        self.max_age, self.decay_power = loss.oldest_replayed, decay_power
        self.retained_versions = loss.oldest_replayed + 2 * config.trainer.checkpoint.every

    def sample(self, version: int) -> list[Group]:
        """Earlier versions' successes, each a group. Collective. Raises RecordError (damaged file), OSError."""
        if not self.max_age:
            return []
        sampled = []
        for name, places in (
            self.exchange.broadcast_on_node(self._choose(version) if self.exchange.writes_node_files else None) or ()
        ):
            chosen = set(places)
            for place, record in enumerate(read_record_file(self.folder / name)):
                if place in chosen:
                    sampled.append(decode_trajectory(record, copy=True))
        trajectories = self.exchange.all_gather_trajectories(sampled)
        return [Group(trajectory.ticket, (trajectory,)) for trajectory in trajectories]

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Store the successes of the update from policy `version`, and delete files that are too old."""
        if not self.max_age or not self.exchange.writes_node_files:
            return
        successes = (t for t in self.exchange.trajectories_to_store(groups) if t.trainable and t.reward > 0)
        path = group_files.group_file_path(self.folder, version, self.exchange.topology.node)
        with continue_without(str(path)):
            group_files.write_trajectories(path, successes)
        for stored, other in self._files():
            if stored <= version - self.retained_versions or (stored == version and other != path):
                other.unlink()

    def _choose(self, version: int) -> list[tuple[str, list[int]]]:
        """Names of this node's files, latest version first, and the sampled places of their records."""
        node = self.exchange.topology.node
        generator = random.Random(f"replay/{self.seed}/{version}" + (f"/{node}" if node else ""))
        chosen, files = [], self._files()
        for age in range(1, min(self.max_age, version) + 1):
            paths = [path for stored, path in files if stored == version - age]
            if not paths:
                path = group_files.group_file_path(self.folder, version - age, node)
                log.warning("%s is missing: successes of version %d are not replayed", path, version - age)
            probability = replay_probability(age, self.max_age, self.decay_power)
            for path in paths:
                places = [n for n in range(count_records(path)) if generator.random() < probability]
                chosen.append((path.name, places))
        return chosen

    def _files(self) -> list[tuple[int, Path]]:
        topology = self.exchange.topology
        return group_files.list_group_files(self.folder, topology.node, topology.node_count)
