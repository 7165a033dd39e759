"""What comes out of the ring: groups that are whole, fresh enough, and carry a gradient."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import JobFailed
from megatron_webrl.ring.record import decode_trajectory
from megatron_webrl.tracking.episode_log import EpisodeLog
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.advantages import common_outcome, has_variance
from megatron_webrl.trainer.checkpoint.resume_point import ResumePoint
from megatron_webrl.trainer.data.group_statistics import GroupStatistics
from megatron_webrl.trainer.exchange.record_exchange import RecordSource
from megatron_webrl.trainer.rewards import reward_function
from megatron_webrl.types import ABORTED, Group, Trajectory

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


class GroupTimeout(JobFailed):
    """The groups of an update did not come. Another trainer would wait for them as long."""


class GroupSource:
    """Assembles groups from the records of the ring, or of all nodes' rings, on the trainer's first rank.

    Life of a record: read when committed, held by its sequence number until its group is whole, then either
    dropped (acknowledged at once and counted by reason) or handed out by `take`; `close_group` acknowledges it
    after the update. A record of another job is acknowledged and not counted: its ticket is run again.

    A record of an episode that is there already (its worker died after writing it, and ran the ticket again) is
    dropped as a duplicate.

    Invariant: every record read is in exactly one of partial, ready, handed out, or closed.
    """

    def __init__(
        self,
        ring: RecordSource,
        config: Config,
        beginning: ResumePoint,
        accounting: Accounting,
        on_close: Callable[[Group], None] = lambda group: None,
        episode_log: EpisodeLog | None = None,
        on_ready: Callable[[Group], None] = lambda group: None,
    ) -> None:
        """`on_close` is told of every group that has been trained or dropped, `episodes` of every episode.

        `on_ready` is told of every group that can be trained as soon as it is there.
        """
        self._on_close, self._episodes, self._on_ready = on_close, episode_log, on_ready
        self._version = 0  # at which the ring was last looked at
        self.records, self.config, self.resume_point, self.accounting = ring, config, beginning, accounting
        self.closed_tickets: set[int] = set()  # tickets trained or dropped in this incarnation
        self.dropped_tickets = 0
        self.episodes_by_worker: Counter[str] = Counter()  # episodes read, by life of their worker
        self._reward = reward_function(config)
        self._arrivals = GroupStatistics(self._reward)
        self._out: set[int] = set()  # tickets handed out and not closed
        self._partial: dict[int, dict[int, int]] = defaultdict(dict)  # ticket -> index -> sequence
        self._ready: dict[int, list[int]] = {}  # ticket -> sequences, in the order of arrival
        self._groups: dict[int, Group] = {}
        self._held: set[int] = set()  # sequences read and not acknowledged

    def wait_for_groups(
        self, version: int, count: int, seconds: float, should_continue: Callable[[int], bool]
    ) -> list[tuple[Group, list[int]]] | None:
        """The `count` oldest trainable groups with their sequence numbers.

        Calls `go_on(groups ready)` at every poll: there the caller reports, raises the ticket limit, and looks for
        an end; None is returned once it answers False. Raises NoGroups naming how many groups are missing
        after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.poll(version)
            if not should_continue(len(self._ready)):
                return None
            if len(self._ready) >= count:
                tickets = list(self._ready)[:count]
                self._out.update(tickets)
                return [(self._groups.pop(t), self._ready.pop(t)) for t in tickets]
            if time.monotonic() > deadline:
                raise GroupTimeout(
                    f"the trainer waited {seconds:.0f} s (trainer.batch_timeout_seconds) for groups from rollout: "
                    f"{len(self._ready)} of {count} arrived; episodes dropped: {self.accounting.format_dropped()}"
                )
            time.sleep(POLL_SECONDS)

    def poll(self, version: int) -> None:
        """Read what has been committed, and drop what cannot be trained at `version`."""
        self._version = version
        for sequence in self.records.committed(self._held):
            self._held.add(sequence)
            self._arrive(sequence, version)
        for ticket in [t for t, group in self._groups.items() if self._stale(group, version)]:
            self._drop(self._groups.pop(ticket), self._ready.pop(ticket), "stale")

    def close_group(self, group: Group, sequences: list[int]) -> None:
        """Count a trained group and free its records."""
        for trajectory in group.trajectories:
            self._count(trajectory, None if trajectory.trainable else _mask_name(trajectory))
        self.closed_tickets.add(group.ticket)
        self._out.discard(group.ticket)
        self._acknowledge(sequences)
        self._on_close(group)

    def pop_metrics(self) -> dict[str, float]:
        """Of the groups that became whole since the last call, dropped ones included: see Arrivals."""
        return self._arrivals.pop_metrics()

    def waiting_episodes(self) -> int:
        """Episodes read and neither trained nor dropped."""
        return sum(map(len, self._partial.values())) + sum(map(len, self._ready.values()))

    def _arrive(self, sequence: int, version: int) -> None:
        trajectory = decode_trajectory(self.records.read(sequence))
        if not self.resume_point.belongs_to_job(trajectory):
            self._acknowledge([sequence])
            return
        self.episodes_by_worker[trajectory.worker] += 1
        ticket = trajectory.ticket
        if (
            ticket in self.closed_tickets
            or self.resume_point.is_closed(ticket)
            or ticket in self._ready
            or ticket in self._out
            or trajectory.index in self._partial.get(ticket, {})
        ):
            self._count(trajectory, "duplicate")
            self._acknowledge([sequence])
            return
        held = self._partial[ticket]
        held[trajectory.index] = sequence
        if len(held) < trajectory.group_size:
            return
        sequences = [held[i] for i in sorted(held)]
        del self._partial[trajectory.ticket]
        group = Group(
            trajectory.ticket, tuple(decode_trajectory(self.records.read(s, verify=False)) for s in sequences)
        )
        self._arrivals.add(group)
        reason = self._reason_to_drop(group, version)
        if reason is not None:
            self._drop(group, sequences, reason)
        else:
            self._groups[group.ticket], self._ready[group.ticket] = group, sequences
            self._on_ready(group)

    def _reason_to_drop(self, group: Group, version: int) -> str | None:
        if any(t.outcome == ABORTED for t in group.trajectories):
            return ABORTED  # whoever ended before may be fresh enough; without the long ones they would mislead
        if not any(t.trainable for t in group.trajectories):
            return "masked"
        if self._stale(group, version):
            return "stale"
        common = common_outcome(group)
        if self.config.trainer.loss.name == "raft":
            return "all_failed" if common == "all_failed" else None
        if self.config.trainer.zero_variance_groups == "drop" and not has_variance(group, self._reward):
            return common or "zero_variance"  # penalties can make a success worth a failure
        return None

    def _stale(self, group: Group, version: int) -> bool:
        versions = map(self.oldest_version, group.trajectories)
        oldest = min((each for each in versions if each is not None), default=None)
        return oldest is not None and version - oldest > self.config.staleness_limit

    def oldest_version(self, trajectory: Trajectory) -> int | None:
        """The version that a trajectory's oldest token counts as, if it is trainable and has one."""
        fixed = self.config.rollout.mode != "async"
        return self.resume_point.oldest_version(trajectory, fixed) if trajectory.trainable else None

    def _drop(self, group: Group, sequences: list[int], reason: str) -> None:
        for trajectory in group.trajectories:
            self._count(trajectory, reason if trajectory.trainable else _mask_name(trajectory))
        self.closed_tickets.add(group.ticket)
        self.dropped_tickets += 1
        self._acknowledge(sequences)
        self._on_close(group)
        log.info("ticket %d dropped: %s", group.ticket, reason)

    def _count(self, trajectory: Trajectory, reason: str | None) -> None:
        """Close an episode as trained, or as dropped for a reason."""
        self.accounting.count_episode(trajectory, reason)
        if self._episodes is not None:
            self._episodes.add(trajectory, reason, self._version)

    def _acknowledge(self, sequences: list[int]) -> None:
        self.records.acknowledge(sequences)
        self._held.difference_update(sequences)


def _mask_name(trajectory: Trajectory) -> str:
    return "no_tokens" if trajectory.outcome in ("success", "failure") else trajectory.outcome
