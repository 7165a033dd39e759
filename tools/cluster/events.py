"""Discrete-event clock and processor-sharing servers."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import partial

Call = Callable[[], None]


class SimulatedClock:
    """Executes calls in the order of their times; calls at the same time in the order of their requests."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds
        self._calls: list[tuple[float, int, Call]] = []
        self._count = 0

    def call_at(self, time: float, call: Call) -> None:
        """Schedule a call at a time that is not over."""
        heapq.heappush(self._calls, (time, self._count, call))
        self._count += 1

    def call_later(self, seconds: float, call: Call) -> None:
        """Schedule a call `seconds` from now."""
        self.call_at(self.now + seconds, call)

    def run_until(self, ended: Callable[[], bool]) -> None:
        """Advance time until `ended()` is true. Raises RuntimeError if no call is left before."""
        while not ended():
            if not self._calls:
                raise RuntimeError(f"deadlock at {self.now:.3f} s: no event is scheduled")
            self.now, _, call = heapq.heappop(self._calls)
            call()


class ServerJob:
    """A job at a server."""

    __slots__ = ("done", "end")

    def __init__(self, end: float, done: Call | None) -> None:
        self.end, self.done = (
            end,
            done,
        )  # end: in units of the server's progress; done: None once it has ended or was cancelled

    def __lt__(self, other: ServerJob) -> bool:
        return self.end < other.end


class ProcessorSharingServer:
    """Processor sharing: all jobs run at the same rate, which depends on their number.

    Progress is the work done for a job that was present from the beginning. A job that starts at progress p ends at
    p + its work, so that an arrival or a departure changes the rate of all jobs in O(log n).
    """

    def __init__(self, clock: SimulatedClock, rate: Callable[[int], float]) -> None:
        """`rate`: work per second of each of n concurrent jobs."""
        self.count = 0
        self.busy_seconds = self.job_seconds = self.work_done = 0.0  # seconds with a job; job-seconds; work done
        self._clock, self._rate = clock, rate
        self._jobs: list[ServerJob] = []
        self._progress, self._since, self._speed = 0.0, 0.0, 1.0
        self._planned = 0  # number of the latest plan; earlier ones are void

    def submit(self, work: float, done: Call) -> ServerJob:
        """Start a job; `done` is called at its end."""
        self.update_totals()
        job = ServerJob(self._progress + work, done)
        heapq.heappush(self._jobs, job)
        self.count += 1
        self._plan()
        return job

    def cancel(self, job: ServerJob) -> None:
        """Remove a job before its end; does nothing if it has ended."""
        if job.done is None:
            return
        self.update_totals()
        job.done = None
        self.count -= 1
        self._plan()

    def set_speed(self, speed: float) -> None:
        """Scale the rate of all jobs by `speed` from this moment on; 0 stops the server."""
        self.update_totals()
        self._speed = speed
        self._plan()

    def update_totals(self) -> None:
        """Update the totals to this moment."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        if self.count and passed:
            done = passed * self._speed * self._rate(self.count)
            self._progress += done
            self.busy_seconds += passed
            self.job_seconds += passed * self.count
            self.work_done += done * self.count

    def _plan(self) -> None:
        self._planned += 1
        while self._jobs and self._jobs[0].done is None:
            heapq.heappop(self._jobs)
        if self._jobs and self._speed:
            seconds = (self._jobs[0].end - self._progress) / (self._speed * self._rate(self.count))
            self._clock.call_later(max(0.0, seconds), partial(self._finish, self._planned))

    def _finish(self, plan: int) -> None:
        if plan != self._planned:
            return
        self.update_totals()
        self._progress = max(self._progress, self._jobs[0].end)  # rounding must not leave a remainder
        ended: list[Call] = []
        while self._jobs and self._jobs[0].end <= self._progress:
            job = heapq.heappop(self._jobs)
            if job.done is not None:
                ended.append(job.done)
                job.done = None
        self.count -= len(ended)
        self._plan()
        for call in ended:
            call()
