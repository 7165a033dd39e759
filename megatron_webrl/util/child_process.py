"""Start and kill child processes so that no process of a run outlives it (Linux). Three layers:

1. `start_process` starts a role that the kernel kills when its parent ends.
2. After `become_subreaper` the launcher inherits the children of a dead role (browsers, engine cores);
   `kill_descendants` kills them at the end, `kill_process_group` before the role is restarted.
3. `sweep_orphans` and `sweep_scratch` remove, by owner, processes and folders that survived a SIGKILL of the launcher.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_webrl.util.child_log import ChildLog

OWNER_VARIABLE = "WEBRL_OWNER"
ROLE_VARIABLE = "WEBRL_ROLE"
SCRATCH_PREFIX = "webrl-"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
MAX_OPEN_FILES = 65_536  # soft limit of roles, where the hard one allows it; some programs slow down with millions
KILL_SECONDS = 10.0  # limit for killed processes to disappear
_POLL_SECONDS = 0.02  # between two checks of signalled processes

# Runs in a new interpreter before the role's program: a preexec_fn can block on a lock held by a thread at the fork.
_BOOTSTRAP = """
import ctypes, os, resource, signal, sys
parent, cores, files, command = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4:]
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
wanted = files if hard == resource.RLIM_INFINITY else min(hard, files)
if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
if cores:
    try:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    except OSError as error:
        sys.stderr.write(f"cannot be bound to cores {cores}: {error.strerror}\\n")
        os._exit(126)
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
    os._exit(125)
try:
    os.execvp(command[0], command)
except OSError as error:
    sys.stderr.write(f"{command[0]}: {error.strerror}\\n")
    os._exit(127)
"""


class ProcessError(RuntimeError):
    """A process could not be started or bound to its parent."""


class ChildProcess(subprocess.Popen[bytes]):
    """A process whose output is copied to its log: all of it, once `poll` or `wait` has returned its exit code."""

    output: ChildLog  # set by start_process

    def describe_end(self) -> str:
        """How it has ended, with the last line of this life's log: "killed by SIGKILL; last log line: ready"."""
        return f"{describe_exit(self.returncode)}; last log line: {self.output.last_line()}"

    def poll(self) -> int | None:
        code = super().poll()
        if code is not None:
            self.output.drain()
        return code

    def wait(self, timeout: float | None = None) -> int:
        code = super().wait(timeout)
        self.output.drain()
        return code


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

    Output is appended to `log` (see ChildLog). `env`: its environment; owner and role name are added. `cores`: cores to
    bind it to (empty: any); it ends at once if the machine has none of them. Its soft limit of open files is raised to
    MAX_OPEN_FILES, or to the hard limit. Raises ProcessError outside the main thread (the kernel would kill the role
    when the calling thread ends) and if the program does not exist.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ProcessError(f"{name} must be started from the main thread: it dies with the thread that starts it")
    if not shutil.which(command[0], path=env.get("PATH", os.defpath)):
        raise ProcessError(f"{name}: {command[0]!r} is not a program in PATH={env.get('PATH', os.defpath)}")
    bootstrap = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid()), ",".join(map(str, cores))]
    bootstrap.append(str(MAX_OPEN_FILES))
    output = ChildLog(log)
    try:
        process = ChildProcess(
            [*bootstrap, *command],
            stdin=subprocess.DEVNULL,
            stdout=output.write_fd,
            stderr=subprocess.STDOUT,
            env={**env, **owner_environment(), ROLE_VARIABLE: name},
            start_new_session=True,
        )
    finally:
        output.start(name)
    process.output = output
    return process


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

    Resource trackers have half of the time after that: they first remove the shared memory of dead processes. The time
    after SIGKILL counts from the first one, as a busy machine may delay it beyond `seconds`.
    """
    begun, terminated, deadline = time.monotonic(), set(), math.inf if seconds else 0.0
    while (left := find()) and (now := time.monotonic()) < deadline:
        elapsed = now - begun
        if elapsed >= kill_after:
            deadline = min(deadline, now + seconds - kill_after)
        for process in left:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if elapsed >= kill_after and (now >= deadline - (seconds - kill_after) / 2 or not _is_tracker(process)):
                    process.kill()
                elif kill_after and process not in terminated:  # psutil compares pid and start time
                    terminated.add(process)
                    process.terminate()
        time.sleep(_POLL_SECONDS)
    return left


def _is_tracker(process: psutil.Process) -> bool:
    """Whether this is Python's resource tracker, which removes semaphores and shared memory of ended processes."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


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
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({pid})"
    except (FileNotFoundError, ProcessLookupError):
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
