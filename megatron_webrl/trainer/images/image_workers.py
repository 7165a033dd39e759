"""Worker processes that cut screenshots into patches, in shared memory, while this process does other things.

Nothing is pickled and no thread runs here: a job is 48 bytes in a pipe, the encoded image and its patches lie in the
arena, and a worker has its next jobs in its pipe before this process looks again.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.model.patchifier import Patchifier
from megatron_webrl.system import child_process
from megatron_webrl.trainer.images.image_worker import JOB_STRUCT, RESULT_STRUCT
from megatron_webrl.trainer.images.shm_allocator import SharedMemoryAllocator

log = logging.getLogger(__name__)

MAX_CRASHES_PER_IMAGE = 2
"""Workers that may die of one image before it counts as one that cannot be cut."""
MAX_CONSECUTIVE_CRASHES = 4
"""Times that a worker may die without having finished anything since."""
SHUTDOWN_SECONDS = 5.0


class ImageWorkerError(RuntimeError):
    """Workers do not live. The message is one line."""


@dataclass
class ImageJob:
    """One image to cut. The encoded image lies in the arena."""

    job_id: int
    image_offset: int  # offset of the encoded image
    image_bytes: int  # of it, bytes
    patches_offset: int  # offset of the patches
    grid: tuple[int, int, int]
    crashes: int = 0  # of workers that had it in hand


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    jobs: int  # descriptors
    done: int
    room: int  # jobs that its pipe holds for certain
    queue: deque[ImageJob] = field(default_factory=deque)  # in the order of their work
    deaths: int = 0  # in a row, of processes in this place


class ImageWorkerPool:
    """Life: `submit` jobs, `collect` what is finished, `wait` for more, `close`.

    Workers die with this process, which has to make the pool in its main thread. One that died is started again, and
    what it had in hand is done again.
    """

    def __init__(self, count: int, arena: SharedMemoryAllocator, cut: Patchifier, log_file: Path) -> None:
        """`log_file` takes what the workers say. Raises ProcessError."""
        self._arena, self._cut, self._log = arena, cut, log_file
        self._workers = [self._start(number) for number in range(count)]

    @property
    def pids(self) -> list[int]:
        """The workers' process ids."""
        return [worker.process.pid for worker in self._workers]

    @property
    def pending_jobs(self) -> int:
        """Jobs that are neither finished nor failed."""
        return sum(len(worker.queue) for worker in self._workers)

    @property
    def full(self) -> bool:
        """Whether the workers take no more jobs for the moment."""
        return all(len(worker.queue) >= worker.room for worker in self._workers)

    def submit(self, job: ImageJob) -> None:
        """Give a job to the worker with the most room. Not while the pool is full."""
        worker = max(self._workers, key=lambda w: w.room - len(w.queue))
        worker.queue.append(job)
        self._write(worker, job)

    def collect(self) -> Iterator[tuple[ImageJob, str]]:
        """Jobs that are finished, each with what went wrong, if anything. Never waits. Raises PoolError."""
        for number, worker in enumerate(self._workers):
            ended = worker.process.poll()  # before its last words are read
            while worker.queue and (message := self._read(worker)):
                _, length = RESULT_STRUCT.unpack(message)
                job, worker.deaths = worker.queue.popleft(), 0
                yield job, bytes(self._arena.view(job.patches_offset, length)).decode(errors="replace")
            if ended is not None:
                yield from self._replace(number, ended)

    def wait(self, seconds: float) -> None:
        """Until something is to be collected, or a worker has died, but no longer than `seconds`."""
        # The end of a pipe whose worker has died is readable, too.
        ready = select.poll()
        for worker in self._workers:
            ready.register(worker.done, select.POLLIN)
        ready.poll(seconds * 1000)

    def describe_job(self, job: int) -> str:
        """Who has the job of that number."""
        for number, worker in enumerate(self._workers):
            if any(queued.job_id == job for queued in worker.queue):
                return f"pixel worker {number} (pid {worker.process.pid}, {len(worker.queue)} images to do)"
        return f"room with the pixel workers ({self.pending_jobs} images to do)"

    def close(self) -> None:
        """End the workers, within a limit."""
        for worker in self._workers:
            os.close(worker.jobs)
            os.close(worker.done)
            child_process.terminate_tree(worker.process, SHUTDOWN_SECONDS)
        self._workers = []

    def _start(self, number: int) -> _Worker:
        jobs_read, jobs_write = os.pipe()
        done_read, done_write = os.pipe()
        command = [sys.executable, "-m", "megatron_webrl.trainer.images.image_worker"]
        given = (self._arena.fd, jobs_read, done_write)
        numbers = (*given, self._arena.size, self._cut.patch_size, self._cut.merge_size)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            process = child_process.start_process(
                [*command, *map(str, numbers)], self._log, environment, f"pixels-{number}", pass_fds=given
            )
        finally:
            os.close(jobs_read)
            os.close(done_write)
        os.set_blocking(jobs_write, False)
        os.set_blocking(done_read, False)
        # A job is written whole into a page of the pipe, or else into the next one.
        room = fcntl.fcntl(jobs_write, fcntl.F_GETPIPE_SZ) // mmap.PAGESIZE * (mmap.PAGESIZE // JOB_STRUCT.size)
        return _Worker(process, jobs_write, done_read, room)

    def _replace(self, number: int, code: int) -> Iterator[tuple[ImageJob, str]]:
        """Another worker in place of one that has ended, with its jobs; what cannot be done is yielded as failed."""
        dead, how = self._workers[number], child_process.describe_exit(code)
        os.close(dead.jobs)
        os.close(dead.done)
        words = f"{how}; last log line: {child_process.last_log_line(self._log)} (log: {self._log})"
        if dead.deaths + 1 >= MAX_CONSECUTIVE_CRASHES:
            raise ImageWorkerError(
                f"pixel worker {number} ended {MAX_CONSECUTIVE_CRASHES} times in a row; the last one {words}"
            )
        log.warning("pixel worker %d (pid %d) %s; starting another", number, dead.process.pid, words)
        fresh = self._workers[number] = self._start(number)
        fresh.deaths = dead.deaths + 1
        if dead.queue:
            dead.queue[0].crashes += 1
        for job in dead.queue:
            if job.crashes >= MAX_CRASHES_PER_IMAGE:
                yield job, f"{MAX_CRASHES_PER_IMAGE} worker processes ended while they decoded it; the last one {how}"
            elif len(fresh.queue) < fresh.room:
                fresh.queue.append(job)
                self._write(fresh, job)
            else:
                yield job, f"the worker started in place of one that {how} takes no more than {fresh.room} images"

    @staticmethod
    def _write(worker: _Worker, job: ImageJob) -> None:
        # A worker that has died takes nothing; `collect` gives its jobs to another.
        with suppress(BrokenPipeError):
            os.write(
                worker.jobs,
                JOB_STRUCT.pack(job.job_id, job.image_offset, job.image_bytes, job.patches_offset, *job.grid[1:]),
            )

    @staticmethod
    def _read(worker: _Worker) -> bytes:
        """What one job came to; nothing if there is none."""
        try:
            return os.read(worker.done, RESULT_STRUCT.size)
        except BlockingIOError:
            return b""
