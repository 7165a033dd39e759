"""A pool of worker processes that cut screenshots into patches in shared memory, in parallel with the trainer.

Nothing is pickled and no thread runs in the trainer: a job is 48 bytes in a pipe, the encoded image and its patches
are in shared memory, and a worker's next jobs wait in its pipe.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import select
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.model.patchifier import Patchifier
from megatron_webrl.trainer.images.image_worker import JOB_STRUCT, RESULT_STRUCT
from megatron_webrl.trainer.images.shm_allocator import SharedMemoryAllocator
from megatron_webrl.util import child_process

log = logging.getLogger(__name__)

MAX_CRASHES_PER_IMAGE = 2  # crashes of workers on one image after which the image counts as undecodable
MAX_CONSECUTIVE_CRASHES = 4  # crashes of a worker, without a finished job in between, that end the trainer
SHUTDOWN_SECONDS = 5.0


class ImageWorkerError(RuntimeError):
    """A worker process keeps crashing. The message is one line."""


@dataclass
class ImageJob:
    """One image to cut. The encoded image is in shared memory."""

    job_id: int
    image_offset: int  # offset of the encoded image
    image_bytes: int  # length of the encoded image
    patches_offset: int  # offset of the patches
    grid: tuple[int, int, int]
    crashes: int = 0  # crashes of workers that were decoding it


@dataclass
class _Worker:
    process: child_process.ChildProcess
    jobs_fd: int
    results_fd: int
    capacity: int  # jobs that surely fit into its pipe
    queue: deque[ImageJob] = field(default_factory=deque)  # in the order of work
    crashes: int = 0  # consecutive crashes of this worker


class ImageWorkerPool:
    """Life cycle: `submit` jobs, `collect` finished ones, `wait` for more, `close`.

    The main thread must create the pool; workers die with it. A crashed worker is replaced, and its jobs are repeated.
    """

    def __init__(self, count: int, allocator: SharedMemoryAllocator, patchifier: Patchifier, log_file: Path) -> None:
        """`log_file` gets the workers' output. Raises ProcessError."""
        self._allocator, self._patchifier, self._log_file = allocator, patchifier, log_file
        self._workers = [self._start(number) for number in range(count)]

    @property
    def pending_jobs(self) -> int:
        """Jobs that are neither finished nor failed."""
        return sum(len(worker.queue) for worker in self._workers)

    @property
    def full(self) -> bool:
        """Whether no worker can take another job."""
        return all(len(worker.queue) >= worker.capacity for worker in self._workers)

    def submit(self, job: ImageJob) -> None:
        """Give a job to the worker with the most room. Requires that the pool is not full."""
        worker = max(self._workers, key=lambda w: w.capacity - len(w.queue))
        worker.queue.append(job)
        self._write(worker, job)

    def collect(self) -> Iterator[tuple[ImageJob, str]]:
        """Finished jobs, each with its error message or "". Never waits. Raises ImageWorkerError."""
        for number, worker in enumerate(self._workers):
            exit_code = worker.process.poll()  # before its last results are read
            while worker.queue and (message := self._read(worker)):
                _, length = RESULT_STRUCT.unpack(message)
                job, worker.crashes = worker.queue.popleft(), 0
                yield job, bytes(self._allocator.view(job.patches_offset, length)).decode(errors="replace")
            if exit_code is not None:
                yield from self._replace(number, exit_code)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until `collect` has something to do; the pipe of a dead worker becomes readable, too."""
        ready = select.poll()
        for worker in self._workers:
            ready.register(worker.results_fd, select.POLLIN)
        ready.poll(seconds * 1000)

    def describe_job(self, job_id: int) -> str:
        """The worker that has the job."""
        for number, worker in enumerate(self._workers):
            if any(queued.job_id == job_id for queued in worker.queue):
                return f"image worker {number} (pid {worker.process.pid}, {len(worker.queue)} images queued)"
        return f"a free image worker ({self.pending_jobs} images queued)"

    def close(self) -> None:
        """Stop the workers within SHUTDOWN_SECONDS each."""
        for worker in self._workers:
            os.close(worker.jobs_fd)
            os.close(worker.results_fd)
            child_process.terminate_tree(worker.process, SHUTDOWN_SECONDS)
        self._workers = []

    def _start(self, number: int) -> _Worker:
        jobs_read, jobs_write = os.pipe()
        results_read, results_write = os.pipe()
        command = [sys.executable, "-m", "megatron_webrl.trainer.images.image_worker"]
        descriptors = (self._allocator.fd, jobs_read, results_write)
        arguments = (*descriptors, self._allocator.size, self._patchifier.patch_size, self._patchifier.merge_size)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            process = child_process.start_process(
                [*command, *map(str, arguments)], self._log_file, environment, f"pixels-{number}", pass_fds=descriptors
            )
        finally:
            os.close(jobs_read)
            os.close(results_write)
        os.set_blocking(jobs_write, False)
        os.set_blocking(results_read, False)
        # The kernel writes a job whole into a page of the pipe, or else into the next page.
        pages = fcntl.fcntl(jobs_write, fcntl.F_GETPIPE_SZ) // mmap.PAGESIZE
        return _Worker(process, jobs_write, results_read, pages * (mmap.PAGESIZE // JOB_STRUCT.size))

    def _replace(self, number: int, exit_code: int) -> Iterator[tuple[ImageJob, str]]:
        """Start another worker with the jobs of a crashed one; yields the jobs that failed."""
        crashed, how = self._workers[number], child_process.describe_exit(exit_code)
        os.close(crashed.jobs_fd)
        os.close(crashed.results_fd)
        reason = f"{crashed.process.describe_end()} (log: {self._log_file})"
        if crashed.crashes + 1 >= MAX_CONSECUTIVE_CRASHES:
            raise ImageWorkerError(
                f"image worker {number} crashed {MAX_CONSECUTIVE_CRASHES} times in a row; the last one {reason}"
            )
        log.warning("image worker %d (pid %d) %s; starting another", number, crashed.process.pid, reason)
        worker = self._workers[number] = self._start(number)
        worker.crashes = crashed.crashes + 1
        if crashed.queue:
            crashed.queue[0].crashes += 1
        for job in crashed.queue:
            if job.crashes >= MAX_CRASHES_PER_IMAGE:
                yield job, f"{MAX_CRASHES_PER_IMAGE} worker processes crashed while decoding it; the last one {how}"
            elif len(worker.queue) < worker.capacity:
                worker.queue.append(job)
                self._write(worker, job)
            else:
                yield job, f"the worker that replaces one that {how} takes at most {worker.capacity} images"

    @staticmethod
    def _write(worker: _Worker, job: ImageJob) -> None:
        # A dead worker reads nothing; `collect` gives its jobs to another one.
        with suppress(BrokenPipeError):
            os.write(
                worker.jobs_fd,
                JOB_STRUCT.pack(job.job_id, job.image_offset, job.image_bytes, job.patches_offset, *job.grid[1:]),
            )

    @staticmethod
    def _read(worker: _Worker) -> bytes:
        """One result; empty if there is none yet."""
        try:
            return os.read(worker.results_fd, RESULT_STRUCT.size)
        except BlockingIOError:
            return b""
