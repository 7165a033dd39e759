"""Assembles groups from ring records and drops those that are stale or carry no gradient."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.ring.record import FOLDER as DAMAGED_FOLDER
from megatron_webrl.ring.record import read_trajectory
from megatron_webrl.track.episodes import EpisodeLog
from megatron_webrl.trainer.accounting import Accounting
from megatron_webrl.trainer.checkpoint.recovery import ResumePoint
from megatron_webrl.trainer.credit.advantages import common_outcome
from megatron_webrl.trainer.credit.rewards import reward_function
from megatron_webrl.trainer.metrics.group_statistics import GroupStatistics, SelectionStatistics, mask_name
from megatron_webrl.trainer.multi_node.exchange import RecordSource
from megatron_webrl.types import ABORTED, Group, Trajectory

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
MIN_TRAINABLE_EPISODES = 2  # of a group, not masked: one alone has no baseline


class GroupTimeout(JobFailed):
    """The groups of an update did not arrive in time. A restarted trainer would wait as long."""


class GroupSource:
    """Assembles groups from the records of one ring, or of all nodes' rings. Used on rank 0 only.

    A record is read when committed, kept by its sequence number until its group is complete, then dropped (acknowledged
    at once and counted by reason) or returned by `wait_for_groups`; `close_group` acknowledges it after the update. A
    record of another job is acknowledged and not counted: its ticket is issued again. A second record of an episode is
    dropped as a duplicate: its worker died after writing the first one, and the ticket was issued again. A damaged
    record is set aside and acknowledged; its group is never complete, so another ticket takes its place. What has
    arrived of it is dropped as stale once it would be, and its ticket closed; at a restart before, it is issued again.
    Invariant: every record read is in exactly one of partial, ready, in use, or closed.
    """

    def __init__(
        self,
        records: RecordSource,
        config: Config,
        resume_point: ResumePoint,
        accounting: Accounting,
        on_close: Callable[[Group], None] = lambda group: None,
        episode_log: EpisodeLog | None = None,
        on_complete: Callable[[Group], None] = lambda group: None,
        on_damaged: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_complete` gets all complete groups, `on_close` trained and dropped ones, `episode_log` closed episodes.

        `on_damaged` is called for each damaged record before it is freed.
        """
        self._on_close, self._episode_log = on_close, episode_log
        self._on_complete, self._on_damaged = on_complete, on_damaged
        self._version = 0  # policy version at the last poll
        self.records, self.config, self.resume_point, self.accounting = records, config, resume_point, accounting
        self.closed_tickets: set[int] = set()  # tickets trained or dropped in this restart epoch
        self.dropped_tickets = 0
        # Version at which each ticket was issued whose group is awaited.
        self.issued = dict.fromkeys(resume_point.surviving_tickets, resume_point.version)
        self.lost_tickets = 0  # open ones whose group cannot become complete
        self.episodes_by_worker: Counter[str] = Counter()  # episodes read, by worker instance
        self._statistics, self._selection = GroupStatistics(reward_function(config)), SelectionStatistics()
        self._has_success: Callable[[str, int], bool] = lambda task_id, version: False
        self._in_use: set[int] = set()  # tickets returned by wait_for_groups and not closed
        # Ticket -> index -> number and content of a record, whose arrays are views of it until it is acknowledged.
        self._partial: dict[int, dict[int, tuple[int, Trajectory]]] = defaultdict(dict)
        self._partial_since: dict[int, int] = {}  # ticket -> policy version when its first record was read
        self._ready: dict[int, list[int]] = {}  # ticket -> sequences, in the order of completion
        self._groups: dict[int, Group] = {}
        self._unacknowledged: set[int] = set()  # sequences read and not acknowledged

    def wait_for_groups(
        self,
        version: int,
        count: int,
        seconds: float,
        should_continue: Callable[[int], bool],
        has_engines: Callable[[], bool] = lambda: True,
        has_success: Callable[[str, int], bool] = lambda task_id, version: False,
    ) -> list[tuple[Group, list[int]]] | None:
        """The `count` oldest trainable groups with their sequence numbers. Raises GroupTimeout after `seconds`.

        Of equally old ones those that were complete first. With rollout.stale=wait, not before all groups have arrived
        that the next update could not train.

        A group that failed as a whole is trainable if `has_success` says that its task has a success to replay.

        At each poll `should_continue(groups ready)` reports progress and raises the limit; once False, returns None.
        Time in which no engine serves does not count, for at most run.startup_timeout_seconds: one is starting again.
        """
        self._has_success = has_success
        last = time.monotonic()
        waited, without_engines, grace = 0.0, 0.0, self.config.run.startup_timeout_seconds
        while True:
            self.poll(version)
            if not should_continue(len(self._ready)):
                return None
            if len(self._ready) >= count and not self._misses_old_group(version):
                age = {ticket: self._decisive_version(self._groups[ticket]) or 0 for ticket in self._ready}
                tickets = sorted(age, key=age.__getitem__)[:count]
                self._in_use.update(tickets)
                return [(self._groups.pop(t), self._ready.pop(t)) for t in tickets]
            now = time.monotonic()
            if without_engines < grace and not has_engines():
                without_engines += now - last
            else:
                waited += now - last
            last = now
            if waited > seconds:
                raise GroupTimeout(
                    f"the trainer waited {waited + without_engines:.0f} s (rollout.episode_timeout_seconds) for groups "
                    f"from rollout: {len(self._ready)} of {count} arrived; episodes dropped: "
                    f"{self.accounting.format_dropped()}"
                )
            time.sleep(POLL_SECONDS)

    def poll(self, version: int) -> None:
        """Read committed records, and drop groups that are too stale for `version`."""
        self._version = version
        for sequence in self.records.committed(self._unacknowledged):
            self._unacknowledged.add(sequence)
            self._add_record(sequence, version)
        for ticket in [t for t, group in self._groups.items() if self._stale(group, version)]:
            self._drop(self._groups.pop(ticket), self._ready.pop(ticket), "stale")
        self._drop_incomplete(version)

    def close_group(self, group: Group, sequences: list[int]) -> None:
        """Count a trained group and free its records."""
        for trajectory in group.trajectories:
            self._count(trajectory, None if trajectory.trainable else mask_name(trajectory))
        self._selection.add(group, None)
        self.closed_tickets.add(group.ticket)
        self._in_use.discard(group.ticket)
        self._acknowledge(sequences)
        self._on_close(group)

    def pop_metrics(self) -> dict[str, float]:
        """Metrics of the groups completed since the last call: see GroupStatistics; and see SelectionStatistics."""
        return self._statistics.pop_metrics() | self._selection.pop_metrics()

    def pop_alarms(self) -> list[str]:
        """What is wrong with the choice of the trained groups since the last call."""
        return self._selection.pop_alarms()

    def waiting_episodes(self) -> int:
        """Episodes read and neither trained nor dropped."""
        return sum(map(len, self._partial.values())) + sum(map(len, self._ready.values()))

    def _add_record(self, sequence: int, version: int) -> None:
        trajectory = read_trajectory(self.records, sequence, self.config.run_folder / DAMAGED_FOLDER)
        if trajectory is None:
            self._on_damaged()
            self.lost_tickets += 1
            self._acknowledge([sequence])
            return
        if not self.resume_point.belongs_to_job(trajectory):
            self._acknowledge([sequence])
            return
        self.episodes_by_worker[trajectory.worker] += 1
        if self._is_duplicate(trajectory):
            self._count(trajectory, "duplicate")
            self._acknowledge([sequence])
            return
        members = self._partial[trajectory.ticket]
        self._partial_since.setdefault(trajectory.ticket, version)
        members[trajectory.index] = sequence, trajectory
        if len(members) == trajectory.group_size:
            self._complete_group(*self._take_partial(trajectory.ticket), version)

    def _take_partial(self, ticket: int) -> tuple[Group, list[int]]:
        """The group so far, in the order of its indices, and its sequences."""
        members = self._partial.pop(ticket)
        del self._partial_since[ticket]
        self.issued.pop(ticket, None)
        sequences, trajectories = zip(*(members[index] for index in sorted(members)), strict=True)
        return Group(ticket, trajectories), list(sequences)

    def _drop_incomplete(self, version: int) -> None:
        """Drop groups that miss a member for so long that they are stale: the ring frees its space in order, and may
        lack room for the missing ones.
        """
        limit = self.config.staleness_limit
        for ticket in [t for t, since in self._partial_since.items() if version - since > limit]:
            self._drop(*self._take_partial(ticket), "stale")
            self.lost_tickets = max(0, self.lost_tickets - 1)  # this one is closed now

    def _is_duplicate(self, trajectory: Trajectory) -> bool:
        ticket = trajectory.ticket
        return (
            ticket in self.closed_tickets
            or self.resume_point.is_closed(ticket)
            or ticket in self._ready
            or ticket in self._in_use
            or trajectory.index in self._partial.get(ticket, {})
        )

    def _complete_group(self, group: Group, sequences: list[int], version: int) -> None:
        self._statistics.add(group)
        self._on_complete(group)
        reason = self._reason_to_drop(group, version)
        if reason is not None:
            self._drop(group, sequences, reason)
        else:
            self._groups[group.ticket], self._ready[group.ticket] = group, sequences

    def _reason_to_drop(self, group: Group, version: int) -> str | None:
        if not group.has_one_task:
            return "several_tasks"  # its episodes share no baseline
        if not group.is_complete:
            return ABORTED
        trainable = sum(t.trainable for t in group.trajectories)
        if not trainable:
            return "masked"
        if self._stale(group, version):
            return "stale"
        common = common_outcome(group)
        if self.config.trainer.loss.imitates_successes:
            return "all_failed" if common == "all_failed" else None
        if self.config.trainer.distillation.alone:
            return None
        if trainable < MIN_TRAINABLE_EPISODES:
            return "few_trainable"  # too few for a baseline
        if common == "all_failed" and self._has_success(group.trajectories[0].task.id, version):
            return None
        return common if self.config.trainer.zero_variance_groups == "drop" else None

    def _stale(self, group: Group, version: int) -> bool:
        limit = self.config.max_token_lag if self._masks_old_tokens else self.config.staleness_limit
        decisive = self._decisive_version(group)
        return decisive is not None and version - decisive > limit

    def _decisive_version(self, group: Group) -> int | None:
        """The version of the group's oldest trainable token, or of its newest one where old tokens are masked."""
        if self._masks_old_tokens:
            versions = [self.resume_point.newest_version(t, False) for t in group.trajectories if t.trainable]
            return max((each for each in versions if each is not None), default=None)
        versions = [self.oldest_version(t) for t in group.trajectories]
        return min((each for each in versions if each is not None), default=None)

    @property
    def _masks_old_tokens(self) -> bool:
        return self.config.rollout.stale == "mask"

    def _misses_old_group(self, version: int) -> bool:
        """Whether groups are awaited whose first token may be too old for the update after that of `version`.

        Not where a damaged record leaves a group incomplete: it never arrives.
        """
        if self.config.rollout.stale != "wait" or self.lost_tickets:
            return False
        oldest = version + 1 - self.config.staleness_limit
        return any(issued < oldest for issued in self.issued.values())

    def oldest_version(self, trajectory: Trajectory) -> int | None:
        """The version of a trajectory's oldest token, as the resume point counts it; None if it is not trainable."""
        fixed_weights = self.config.rollout.mode != "async"
        return self.resume_point.oldest_version(trajectory, fixed_weights) if trajectory.trainable else None

    def _drop(self, group: Group, sequences: list[int], reason: str) -> None:
        for trajectory in group.trajectories:
            self._count(trajectory, reason if trajectory.trainable else mask_name(trajectory))
        self._selection.add(group, reason)
        self.closed_tickets.add(group.ticket)
        self.dropped_tickets += 1
        self._acknowledge(sequences)
        self._on_close(group)
        log.info("ticket %d dropped: %s", group.ticket, reason)

    def _count(self, trajectory: Trajectory, reason: str | None) -> None:
        """Close an episode as trained, or as dropped for a reason."""
        self.accounting.count_episode(trajectory, reason)
        if self._episode_log is not None:
            self._episode_log.add(trajectory, reason, self._version)

    def _acknowledge(self, sequences: list[int]) -> None:
        self.records.acknowledge(sequences)
        self._unacknowledged.difference_update(sequences)
