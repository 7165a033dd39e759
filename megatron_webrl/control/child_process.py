"""Start, watch, restart and kill child processes so that no process of a run outlives it (Linux).

1. `start_process` starts a role that the kernel kills when its parent ends; `SupervisedProcess` restarts it.
2. After `become_subreaper` the launcher inherits the children of a dead role (browsers, engine cores);
   `kill_descendants` kills them at the end, `kill_process_group` before the role is restarted.
3. `sweep_orphans` and `sweep_scratch` remove, by owner, processes and folders that survived a SIGKILL of the launcher.

On SIGUSR2 each `webrl` process and engine process writes the stacks of its threads into its log.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import hashlib
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_webrl.util.text import printable

OWNER_VARIABLE = "WEBRL_OWNER"
ROLE_VARIABLE = "WEBRL_ROLE"
SCRATCH_PREFIX = "webrl-"
MAX_LOG_BYTES = 64 * 2**20  # a log that has reached this is renamed to <name>.1
KEPT_LOGS = 3  # <name>.1 to <name>.3
TAIL_BYTES = 32 * 2**10  # of the output of a child, kept for messages
MAX_OPEN_FILES = 65_536  # soft limit of roles, where the hard one allows it; some programs slow down with millions
KILL_SECONDS = 10.0  # limit for killed processes to disappear
HOUR = 3600.0  # seconds
FIRST_DELAY_SECONDS = 1.0  # before the second restart; doubles with each further one
MAX_DELAY_SECONDS = 60.0
JITTER = 0.5  # largest share of a delay that chance takes off, so that processes that fail together restart apart
DUMP_SIGNAL = signal.SIGUSR2
_DUMP_SECONDS = 5.0  # for the stacks of one process
_POLL_SECONDS = 0.02  # between two checks of signalled processes
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

# Runs in a new interpreter before the role's program: a preexec_fn can block on a lock held by a thread at the fork.
_BOOTSTRAP = """
import ctypes, os, resource, signal, sys
parent, cores, files, *command = sys.argv[1:]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(files) if hard < 0 else min(int(files), hard), hard))
try:
    if cores:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() == int(parent):
        os.execvp(command[0], command)
except OSError as error:
    sys.exit(f"cannot run {command[0]} on cores {cores or 'of any number'}: {error.strerror}")
"""


class ProcessError(RuntimeError):
    """A process could not be started or bound to its parent."""


def last_line(text: str) -> str:
    """The last line with ERROR of an output, else its last line that is not empty; "none" without one."""
    lines = [line.strip() for line in text.splitlines()[-200:] if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return printable((errors or lines or ["none"])[-1][:500])


class ChildProcess(subprocess.Popen[bytes]):
    """A process whose output is copied to a log file of limited size: all of it, once `poll` or `wait` has returned its
    exit code.

    It and its own children write to a pipe, which a thread of this process reads, so that a rotation loses no line. An
    error of the file system costs lines, which are counted, and never blocks the child.
    """

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str], name: str) -> None:
        """`log`: a file, or what can be opened as one, such as this process's own output."""
        self.log = log
        self._tail, self._lost = b"", 0
        self._lock = threading.Lock()
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        self._pipe = os.fdopen(read_fd, "rb", buffering=0)
        self._write(b"")
        threading.Thread(target=self._copy_all, name=f"log of {name}", daemon=True).start()
        try:
            super().__init__(
                command, stdin=subprocess.DEVNULL, stdout=write_fd, stderr=subprocess.STDOUT, env=env,
                start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(write_fd)

    def describe_end(self) -> str:
        """How it has ended, with the last line of this life's log: "killed by SIGKILL; last log line: ready"."""
        return f"{describe_exit(self.returncode)}; last log line: {self.last_line()}"

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None:
            self._drain()
        return code

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self._drain()
        return code

    def add_line(self, line: str) -> None:
        """Add a line of the parent's own to the log."""
        with self._lock:
            self._write(f"{line}\n".encode())

    def last_line(self) -> str:
        """The last line that this life has written (see the function)."""
        self._drain()
        return last_line(self._tail.decode(errors="replace"))

    def _drain(self) -> None:
        while self._copy():
            pass

    def _copy_all(self) -> None:
        while self._copy() != b"":
            select.select([self._pipe], [], [])
        with self._lock:
            self._pipe.close()

    def _copy(self) -> bytes | None:
        """Copy a chunk; None if there is none yet, empty once nobody can write any more."""
        with self._lock:
            if chunk := b"" if self._pipe.closed else self._pipe.read(2**16):
                self._write(chunk)
            return chunk

    def _write(self, chunk: bytes) -> None:
        whole_lines = not self._tail or self._tail.endswith(b"\n")
        self._tail = (self._tail + chunk)[-TAIL_BYTES:]
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if self.log.is_file() and self.log.stat().st_size >= MAX_LOG_BYTES * (1 if whole_lines else 2):
                for number in range(KEPT_LOGS, 0, -1):
                    newer = self.log.with_name(f"{self.log.name}.{number - 1}") if number > 1 else self.log
                    if newer.exists():
                        newer.replace(self.log.with_name(f"{self.log.name}.{number}"))
            with self.log.open("ab", buffering=0) as file:
                if self._lost:
                    file.write(f"ERROR {self._lost} bytes of output were lost: the log was not writable\n".encode())
                    self._lost = 0
                while chunk:
                    chunk = chunk[file.write(chunk) :]
        except OSError:  # such as a full disk
            self._lost += len(chunk)


def collect_garbage() -> None:
    """Collect garbage from here on, in a process that imported its program without collections.

    What has been imported stays, and later collections do not look at it.
    """
    gc.freeze()
    gc.enable()


def start_time(pid: int) -> int:
    """Start time of a process in kernel clock ticks, 0 if there is none; pid and start time identify one process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_alive(pid: int, started: int) -> bool:
    """Whether the process with this pid and start time still runs; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and int(fields[19]) == started and fields[0] not in ("Z", "X")


def die_with_parent(signal_number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel signal this process when its parent ends.

    `parent`: pid of the expected parent; if that process has ended already, this one gets the signal at once. Without
    it only an end during the call is noticed. The kernel signals when the parent *thread* that created this process
    ends, so roles are started from the main thread. The setting survives exec, not fork.
    """
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal_number)


def become_subreaper(active: bool = True) -> None:
    """Make this process, instead of init, the new parent of descendants whose parent ends; or let it be so no more."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(active))


def owner_environment() -> dict[str, str]:
    """Environment that marks processes as owned by this one, for `sweep_orphans`."""
    return {OWNER_VARIABLE: f"{os.getpid()}:{start_time(os.getpid())}"}


def start_process(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    name: str,
    cores: Sequence[int] = (),
) -> ChildProcess:
    """Start a role in a session of its own; the kernel kills it when this process ends.

    Output is appended to `log`. `env`: its environment; owner and role name are added. `cores`: cores to bind it to
    (empty: any); it ends at once if the machine has none of them. Its soft limit of open files is MAX_OPEN_FILES, or
    the hard limit. Raises ProcessError outside the main thread: the kernel would kill the role
    when the calling thread ends.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ProcessError(f"{name} must be started from the main thread: it dies with the thread that starts it")
    bootstrap = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP]
    options = [str(os.getpid()), ",".join(map(str, cores)), str(MAX_OPEN_FILES)]
    environment = {**env, **owner_environment(), ROLE_VARIABLE: name}
    return ChildProcess([*bootstrap, *options, *command], log, environment, name)


def restart_delay(number: int, chance: float) -> float:
    """Seconds before restart `number` of a series, from 1: the first is immediate. `chance`: from [0, 1]."""
    if number <= 1:
        return 0.0
    return min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(number - 2, 16)) * (1 - JITTER * chance)


@dataclass
class RestartPolicy:
    """Budget of one process: at most `max_restarts` within any `window_seconds`.

    A failure is recorded by `next_restart`, which grants a restart or returns None once the budget is spent. Restarts
    older than the window are forgotten, and with them the delay that they added.
    """

    max_restarts: int
    window_seconds: float = HOUR
    _failures: deque[float] = field(default_factory=deque)  # times of those after which a restart was granted

    def next_restart(self, now: float) -> float | None:
        """The time of the restart after a failure at `now` (monotonic seconds); None if the budget is spent."""
        while self._failures and now - self._failures[0] >= self.window_seconds:
            self._failures.popleft()
        if self.used >= self.max_restarts:
            return None
        self._failures.append(now)
        return now + restart_delay(self.used, random.random())

    @property
    def used(self) -> int:
        """Restarts granted within the window that ended with the last failure."""
        return len(self._failures)


@dataclass
class SupervisedProcess:
    """Life cycle: made, `start`, then `poll_failure` repeatedly; after a failure `schedule_restart` or nothing."""

    name: str
    command: list[str]
    environment: Mapping[str, str]
    log: Path
    cores: tuple[int, ...] = ()  # to bind it to; empty: any
    policy: RestartPolicy = field(default_factory=lambda: RestartPolicy(0))
    may_exit: bool = True  # whether exit code 0 is no failure
    process: ChildProcess = field(init=False)
    started_at: float = 0.0  # monotonic time of the last start
    restart_at: float | None = None  # monotonic time of the scheduled restart
    survived_kill: bool = False  # this life did not end after SIGKILL
    _reported: bool = False  # whether `poll_failure` has reported the end of this life

    def start(self) -> SupervisedProcess:
        """Start the process in the main thread. Raises ProcessError."""
        self.process = start_process(self.command, self.log, self.environment, self.name, self.cores)
        self.started_at, self.restart_at = time.monotonic(), None
        self.survived_kill = self._reported = False
        return self

    @property
    def is_active(self) -> bool:
        """Whether the process runs or will."""
        return self.restart_at is not None or self.process.poll() is None

    def failure_message(self) -> str | None:
        """How this life of the process failed; None while it runs and after a clean exit."""
        code = self.process.poll()
        if code is None and self.survived_kill:
            late = f"runs {KILL_SECONDS:g} s after SIGKILL, in a call to a file system or device"
            return f"{self.name} {late} (log: {self.log})"
        if code is None or (code == 0 and self.may_exit):
            return None
        return f"{self.name} {self.process.describe_end()} (log: {self.log})"

    def poll_failure(self) -> str | None:
        """The message of a failure, once per life."""
        if self.restart_at is not None or self._reported or (message := self.failure_message()) is None:
            return None
        self._reported = True
        return message

    def kill(self) -> None:
        """Kill the process. It has failed, too, if it does not end within KILL_SECONDS."""
        self.process.kill()
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.survived_kill = True

    def schedule_restart(self) -> bool:
        """Kill what is left of the process, and schedule a restart if the policy grants one."""
        kill_process_group(self.process.pid)
        self.restart_at = self.policy.next_restart(time.monotonic())
        return self.restart_at is not None

    def restart_if_due(self) -> bool:
        """Start the process again if it is time. Raises ProcessError."""
        if self.restart_at is None or time.monotonic() < self.restart_at:
            return False
        self.start()
        return True


def kill_descendants(
    seconds: float, roles: Sequence[subprocess.Popen[bytes]] = (), spared: Collection[psutil.Process] = ()
) -> list[str]:
    """End every descendant: SIGTERM, after half of `seconds` SIGKILL; return the remaining ones as "name (pid)".

    `become_subreaper` adds orphans. Ended children are reaped; `roles` through their Popen, which keeps the exit code.
    `spared`: children that stay, with their descendants.
    """

    def find() -> list[psutil.Process]:
        reap(roles)
        # A process looks like a zombie as soon as its first thread has ended; until it can be reaped it keeps its files
        # and locks.
        return [each for child in psutil.Process().children() if child not in spared for each in family(child.pid)]

    return sorted(process_name(process.pid) for process in _end(find, seconds, seconds / 2))


def family(pid: int) -> list[psutil.Process]:
    """A process, a zombie too, and its descendants; empty if it has ended."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        found.append(psutil.Process(pid))
        found += found[0].children(recursive=True)
    return found


def kill_process_group(leader: int, seconds: float = KILL_SECONDS) -> None:
    """Kill a process group within `seconds`; its resource tracker has half of that to end by itself."""
    _end(lambda: _running(each for each in psutil.process_iter() if process_group(each.pid) == leader), seconds)


def sweep_orphans(seconds: float = 5.0) -> list[str]:
    """Kill this user's orphans and their descendants; return them as "name (pid)".

    A process is an orphan if its environment names an owner that no longer runs. Never killed: this process, its
    ancestors and descendants, processes of other users, and processes of other PID namespaces.
    """
    me = psutil.Process()
    kept = {me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    orphans: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid not in kept and _is_orphan(process):
            # Descendants are included unmarked: Chromium's renderers overwrite their environment.
            orphans |= {victim.pid: victim for victim in family(process.pid)}
    names = [process_name(pid) for pid in sorted(orphans)]
    _end(lambda: _running(orphans.values()), seconds)
    return names


def terminate_tree(process: subprocess.Popen[bytes], seconds: float = 0.0) -> None:
    """Kill a group leader, its descendants and its group; with `seconds` it gets SIGTERM first, and that time."""
    descendants = family(process.pid)[1:] if process.poll() is None else []
    if seconds:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    kill_process_group(process.pid)
    _end(lambda: _running(descendants), KILL_SECONDS)
    process.wait(KILL_SECONDS)


def _end(find: Callable[[], list[psutil.Process]], seconds: float, kill_after: float = 0.0) -> list[psutil.Process]:
    """End the processes that `find` returns: SIGTERM, after `kill_after` seconds SIGKILL; return the remaining ones.

    Resource trackers have half of the time after that: they first remove the shared memory of dead processes.
    """
    terminated: set[psutil.Process] = set()  # psutil compares pid and start time
    left = find()
    for step, limit in enumerate((kill_after, (seconds - kill_after) / 2, (seconds - kill_after) / 2)):
        deadline = time.monotonic() + limit
        while left and time.monotonic() < deadline:
            for process in left:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    if step == 2 or (step == 1 and "multiprocessing.resource_tracker" not in str(process.cmdline())):
                        process.kill()
                    elif step == 0 and process not in terminated:
                        terminated.add(process)
                        process.terminate()
            time.sleep(_POLL_SECONDS)
            left = find()
    return left


def register_dump_signal() -> None:
    """Let SIGUSR2 write the stacks of all threads of this process to its standard error."""
    faulthandler.register(DUMP_SIGNAL, 2, all_threads=True)


def dump_stacks(leader: int, log: Path, why: str) -> list[str]:
    """Log `why` and the stacks of a role and its descendants, in 5 s each; return a message for each that failed.

    Programs that do not handle the signal, such as browsers, never get it: it would end them.
    """
    missing = []
    for process in family(leader):
        name = process_name(process.pid)
        with suppress(psutil.Error, OSError):  # it has ended, or the disk fails, which is no reason not to kill
            if _handles_dump_signal(process):
                with log.open("a") as file:
                    file.write(f"-- stacks of {name}: {why} --\n")
                before = size = log.stat().st_size
                process.send_signal(DUMP_SIGNAL)
                deadline = time.monotonic() + _DUMP_SECONDS
                while time.monotonic() < deadline and (size == before or size != log.stat().st_size):
                    size = log.stat().st_size
                    time.sleep(0.1)  # without more lines: the dump is complete
                if size == before:
                    missing.append(f"{name} does not show its stacks: it is stopped, or waits for a device")
            elif process.pid == leader:
                missing.append(f"{name} does not show its stacks yet: it has only just started")
    return missing


def _handles_dump_signal(process: psutil.Process) -> bool:
    """Whether a process is a Python with a handler for the signal; other programs use it otherwise."""
    caught = next(line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return Path(process.exe()).name.startswith("python") and bool(int(caught.split()[1], 16) >> (DUMP_SIGNAL - 1) & 1)


def _running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes that still run: their pid was not reused, and they are no zombies."""
    return [each for each in processes if each.is_running() and is_alive(each.pid, start_time(each.pid))]


def process_group(pid: int) -> int:
    """The group of a process; 0 if it has ended."""
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0


def describe_exit(code: int) -> str:
    """An exit code in words: "killed by SIGKILL", "exited with code 1"."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def make_scratch_folder(prefix: str = SCRATCH_PREFIX, parent: str | None = None) -> Path:
    """Make a folder, in TMPDIR or `parent`, for temporary files of this process or its roles; its name has the owner.

    The owner is a process and its machine: nodes may share a TMPDIR.
    """
    owner = f"{os.getpid()}-{start_time(os.getpid())}-{_machine()}"
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{owner}-", dir=parent))


def sweep_scratch(prefix: str = SCRATCH_PREFIX) -> list[str]:
    """Remove this user's scratch folders with this prefix whose owner ended on this machine; return their names."""
    removed = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*-*-{_machine()}-*")):
        pid, started = folder.name.removeprefix(prefix).split("-")[:2]
        if not (pid.isdigit() and started.isdigit()) or is_alive(int(pid), int(started)):
            continue
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def _machine() -> str:
    """Where a pid means the same process: a hash of the host name, which outlives a reboot, and the pid namespace."""
    return hashlib.sha256(f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:6]


def _is_orphan(process: psutil.Process) -> bool:
    with suppress(psutil.Error, OSError):  # it has ended meanwhile, or belongs to another user
        if process.uids().effective != os.getuid():
            return False
        if os.readlink(f"/proc/{process.pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
            return False
        owner, _, started = process.environ().get(OWNER_VARIABLE, "").partition(":")
        return owner.isdigit() and started.isdigit() and not is_alive(int(owner), int(started))
    return False


def reap(roles: Sequence[subprocess.Popen[bytes]]) -> None:
    """Reap children that have ended, those inherited after `become_subreaper` too, such as Chromium's: each holds a
    pid. `roles` through their Popen, which keeps the exit code.
    """
    by_pid = {role.pid: role for role in roles if role.returncode is None}
    with suppress(ChildProcessError):  # there is no child
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in by_pid:
                by_pid[ended.si_pid].poll()
            else:
                os.waitpid(ended.si_pid, 0)


def process_name(pid: int) -> str:
    """Name and pid of a process: "python (17)"."""
    with suppress(psutil.NoSuchProcess):
        return f"{psutil.Process(pid).name()} ({pid})"
    return f"ended ({pid})"


def _stat(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the third (state) on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise ProcessError(f"prctl({option}, {value}) failed: {os.strerror(ctypes.get_errno())}")
