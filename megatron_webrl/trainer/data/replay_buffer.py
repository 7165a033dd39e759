"""Record files of updates, and the replay of earlier versions' successes from them.

version-000003.records, version-000003.node-1.records: trajectories that the update from policy version 3 took from the
rings of nodes 0 and 1.
"""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_webrl.config.schema import Config
from megatron_webrl.ring.record import (
    RecordFileWriter,
    count_records,
    decode_trajectory,
    encode_trajectory,
    read_record_file,
)
from megatron_webrl.trainer.credit.advantages import common_outcome
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
    """Stores successes and trains them again. Call `batch` before each update and `add` after it, on every rank.

    Imitation (replay_versions) samples from all successes of the last versions, each as a group of its own. For other
    losses (replay_into_failed_groups) the newest success of a task completes a group of this task that failed as a
    whole, as one more episode of it; one success of each trained group that has any is stored.

    Without either both do nothing. A resumed run samples the versions up to its checkpoint and overwrites
    later ones. One rank per node writes the successes of its ring, and all ranks sample them. Files stay for
    these versions and two checkpoint intervals; a resume from further back samples what remains. Episodes count when
    first trained.
    """

    def __init__(
        self, config: Config, exchange: RecordExchange, version: int = 0, decay_power: float = DECAY_POWER
    ) -> None:
        """`version`: at which training starts or resumes. Collective. Raises RecordError (damaged file), OSError."""
        self.exchange, loss = exchange, config.trainer.loss
        self.folder, self.seed = config.run_folder / "replay", config.run.seed
        self.max_age, self.decay_power = loss.oldest_replayed, decay_power
        self.retained_versions = loss.oldest_replayed + 2 * config.trainer.checkpoint.every
        self._imitates = loss.imitates_successes
        self._newest: dict[str, int] = {}  # without imitation, by task id: version of its newest stored success
        if self.max_age and not self._imitates:
            self._restore(version)

    def batch(self, groups: Sequence[Group], version: int) -> list[Group]:
        """The groups of the update from policy `version` with the successes that it replays. Collective.

        Raises RecordError (damaged file), OSError.
        """
        if not self.max_age:
            return list(groups)
        if self._imitates:
            return [*groups, *self._sample(version)]
        failed = [group.trajectories[0].task.id for group in groups if common_outcome(group) == "all_failed"]
        replayed = self._read({task for task in failed if self.has_success(task, version)})
        return [_completed(group, replayed) if common_outcome(group) == "all_failed" else group for group in groups]

    def has_success(self, task_id: str, version: int) -> bool:
        """Whether a group of this task that failed as a whole can be completed in the update from policy `version`."""
        return task_id in self._newest and version - self._newest[task_id] <= self.max_age

    def _sample(self, version: int) -> list[Group]:
        """Earlier versions' successes, each a group. Collective."""
        sampled = []
        for path, places in self._choose(version):
            for place, record in enumerate(read_record_file(path)):
                if place in places:
                    sampled.append(decode_trajectory(record, copy=True))
        trajectories = self.exchange.all_gather_trajectories(sampled)
        return [Group(trajectory.ticket, (trajectory,)) for trajectory in trajectories]

    def add(self, groups: Sequence[Group], version: int) -> None:
        """Store the successes of the update from policy `version`, and delete files that are too old."""
        if not self.max_age:
            return
        if not self._imitates:
            self._newest |= {
                t.task.id: version for group in groups for t in group.trajectories if t.is_trainable_success
            }
        if not self.exchange.topology.is_node_leader:
            return
        stored = self.exchange.trajectories_to_store(groups)
        successes = [t for t in stored if t.is_trainable_success]
        if not self._imitates:  # one of each group
            successes = [*{t.ticket: t for t in successes}.values()]
        path = group_file_path(self.folder, version, self.exchange.topology.node)
        with continue_without(str(path)):
            write_trajectories(path, successes)
        for known, other in self._files():
            if known <= version - self.retained_versions or (known == version and other != path):
                other.unlink()

    def _read(self, tasks: set[str]) -> dict[str, Trajectory]:
        """The newest stored success of each task, whichever node has it. Collective."""
        found: dict[str, Trajectory] = {}
        for stored, path in self._files() if tasks else ():
            if any(self._newest[task] == stored for task in tasks):
                for trajectory in (decode_trajectory(record, copy=True) for record in read_record_file(path)):
                    if trajectory.task.id in tasks and self._newest[trajectory.task.id] == stored:
                        found.setdefault(trajectory.task.id, trajectory)
        gathered = self.exchange.all_gather_trajectories([*found.values()])
        return {trajectory.task.id: trajectory for trajectory in reversed(gathered)}

    def _restore(self, version: int) -> None:
        """Learn from the files which tasks have a success of a version below `version`. Collective."""
        own = []
        if self.exchange.topology.is_node_leader:
            for stored, path in self._files():
                tasks = (decode_trajectory(record).task.id for record in read_record_file(path) if stored < version)
                own += [json.dumps([task, stored]).encode() for task in tasks]
        for records in self.exchange.all_gather_records(own).values():
            for task, stored in map(json.loads, records):
                self._newest[task] = max(stored, self._newest.get(task, 0))

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


def _completed(group: Group, successes: Mapping[str, Trajectory]) -> Group:
    """The group with a success of its task, if there is one, as one more episode."""
    success = successes.get(group.trajectories[0].task.id)
    if success is None:
        return group
    joined = replace(success, ticket=group.ticket, index=max(t.index for t in group.trajectories) + 1)
    return Group(group.ticket, (*group.trajectories, joined))


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
