"""No process of a run outlives it (Linux): death with the parent, and two nets below that.

1. `start` makes a role that the kernel kills when its parent ends.
2. `become_subreaper` and `kill_descendants`: what a dead role left behind (browsers, engine cores) is handed
   to the launcher, which ends it with the rest; `kill_group` when the role is to start again.
3. `sweep_orphans` and `sweep_scratch`: processes that survive even a SIGKILL of the launcher carry the name of
   their owner in their environment, folders of temporary files carry it in their name; the next start removes both.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

OWNER_VARIABLE = "WEBRL_OWNER"
ROLE_VARIABLE = "WEBRL_ROLE"
SCRATCH_PREFIX = "webrl-"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
KILL_SECONDS = 10.0  # for killed processes to be gone
_POLL_SECONDS = 0.02  # between two checks of signalled processes

# Runs between fork and the role's program, in an interpreter of its own: Python code in a forked copy of a
# process with threads (preexec_fn) can block for ever on a lock that another thread held at the fork.
_BOOTSTRAP = """
import ctypes, os, signal, sys
parent, cores, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
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
    """A process could not be started or guarded as asked."""


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 if there is none. With the pid it names one process."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def is_alive(pid: int, started: int) -> bool:
    """Whether the process that had this pid and start time still runs; a zombie does not."""
    fields = _stat(pid)
    return bool(fields) and int(fields[19]) == started and fields[0] not in ("Z", "X")


def process_state(pid: int) -> str:
    """The kernel's letter for what a process does, such as "T" for one that is stopped; empty if there is none."""
    return _stat(pid)[0] if _stat(pid) else ""


def die_with_parent(signal_number: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel signal this process when its parent ends.

    Given the pid of the parent it expects, a process whose parent ended before this call gets the signal at once;
    without, only an end during the call is noticed. The kernel signals when the parent's *thread* that made this
    process ends, so roles are started from the main thread. The setting outlives exec, not fork.
    """
    expected = os.getppid() if parent is None else parent
    _prctl(_PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != expected:
        os.kill(os.getpid(), signal_number)


def become_subreaper() -> None:
    """From here on, descendants whose parent ends become children of this process instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def owner_environment() -> dict[str, str]:
    """Environment that marks processes as owned by this one, for `sweep_orphans`."""
    return {OWNER_VARIABLE: f"{os.getpid()}:{start_time(os.getpid())}"}


def start_process(
    command: Sequence[str],
    log: Path,
    env: Mapping[str, str],
    name: str,
    pass_fds: Sequence[int] = (),
    cores: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a role in a session of its own, its output appended to `log`; the kernel kills it when this process ends.

    `env` is the whole environment, to which owner and role name are added; `pass_fds` are open in it, too. It may run
    on `cores` only, if any are given: those of them that this machine has, and it ends at once if it has none. Raises
    ProcessError outside the main thread (the kernel would kill the role when the calling thread ends) and for a program
    that is not there.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ProcessError(f"{name} must be started from the main thread: it dies with the thread that starts it")
    if not shutil.which(command[0], path=env.get("PATH", os.defpath)):
        raise ProcessError(f"{name}: {command[0]!r} is not a program in PATH={env.get('PATH', os.defpath)}")
    log.parent.mkdir(parents=True, exist_ok=True)
    bootstrap = [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(os.getpid()), ",".join(map(str, cores))]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*bootstrap, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**env, **owner_environment(), ROLE_VARIABLE: name},
            start_new_session=True,
            pass_fds=pass_fds,
        )


def kill_descendants(seconds: float, roles: Sequence[subprocess.Popen[bytes]] = ()) -> list[str]:
    """End every descendant: SIGTERM, after half of `seconds` SIGKILL; returns what is left, as "name (pid)".

    Python's resource trackers, which end by themselves when they have removed what the dead have left in /dev/shm, are
    killed only after three quarters.

    After `become_subreaper` this covers processes whose own parent is gone. Ended children are reaped; those in `roles`
    through their Popen, which keeps their exit code.
    """
    begun, terminated = time.monotonic(), set()
    while True:
        _reap(roles)
        # What cannot be reaped yet still holds its files and locks: a process looks like a zombie as soon as its first
        # thread has ended.
        running = psutil.Process().children(recursive=True)
        elapsed = time.monotonic() - begun
        if not running or elapsed >= seconds:
            return sorted(_name(process.pid) for process in running)
        for process in running:
            with suppress(psutil.NoSuchProcess):
                if elapsed >= seconds / 2 and (elapsed >= seconds * 3 / 4 or not _is_tracker(process)):
                    process.kill()
                elif process not in terminated:  # psutil compares pid and start time
                    terminated.add(process)
                    process.terminate()
        time.sleep(_POLL_SECONDS)


def kill_process_group(leader: int, seconds: float = KILL_SECONDS) -> None:
    """Kill the processes of a group, within `seconds`; its resource tracker is left half of that to end by itself."""
    _kill(lambda: [process for process in psutil.process_iter() if _group(process.pid) == leader], seconds)


def sweep_orphans(seconds: float = 5.0) -> list[str]:
    """Kill this user's processes whose owner is gone, and their descendants; returns them as "name (pid)".

    A process is an orphan if its environment names an owner that does not run. Never killed: this process, its
    ancestors and descendants, and processes of other users or PID namespaces (whose numbers mean others).
    """
    me = psutil.Process()
    kept = {me.pid, *(p.pid for p in me.parents()), *(p.pid for p in me.children(recursive=True))}
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if process.pid in kept or not _is_orphan(process.pid):
            continue
        with suppress(psutil.NoSuchProcess):
            # Descendants need no mark of their own: Chromium's renderers overwrite their environment.
            found |= {victim.pid: victim for victim in (process, *process.children(recursive=True))}
    names = [_name(pid) for pid in sorted(found)]
    _kill(lambda: list(found.values()), seconds)
    return names


def _kill(find: Callable[[], list[psutil.Process]], seconds: float) -> None:
    """Kill what `find` names until nothing of it runs, or `seconds` are over; resource trackers after half of them."""
    begun = time.monotonic()
    while left := [process for process in find() if _runs(process)]:
        elapsed = time.monotonic() - begun
        if elapsed >= seconds:
            return
        for process in left:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if elapsed >= seconds / 2 or not _is_tracker(process):
                    process.kill()
        time.sleep(_POLL_SECONDS)


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it removes semaphores and shared memory of others, once they are all gone."""
    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    return False


def _group(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getpgid(pid)
    return 0


def _runs(process: psutil.Process) -> bool:
    """Whether it still is that process, and no zombie."""
    return process.is_running() and is_alive(process.pid, start_time(process.pid))


def terminate_tree(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ask a process that leads a group to end; after `seconds` it, its descendants and its group are killed."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    kill_process_group(process.pid)
    _kill(lambda: family, KILL_SECONDS)
    process.wait(KILL_SECONDS)


def last_log_line(log: Path) -> str:
    """The last line of a log that says something, of errors if there are any."""
    if not log.is_file():
        return "none"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[-200:] if line.strip()]
    errors = [line for line in lines if "ERROR" in line]
    return (errors or lines or ["none"])[-1][:500]


def describe_exit(code: int) -> str:
    """What an exit code says."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


def make_scratch_folder(prefix: str = SCRATCH_PREFIX) -> Path:
    """A new folder for temporary files of this process or its roles; `sweep_scratch` knows its owner by its name."""
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-{start_time(os.getpid())}-"))


def sweep_scratch(prefix: str = SCRATCH_PREFIX) -> list[str]:
    """Remove this user's scratch folders of this prefix whose owner is gone; returns their names."""
    removed = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*-*-*")):
        pid, started, _ = folder.name.removeprefix(prefix).split("-", 2)
        if not (pid.isdigit() and started.isdigit()) or is_alive(int(pid), int(started)):
            continue
        if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed


def _is_orphan(pid: int) -> bool:
    try:
        if os.stat(f"/proc/{pid}").st_uid != os.getuid():
            return False
        if os.stat(f"/proc/{pid}/ns/pid").st_ino != os.stat("/proc/self/ns/pid").st_ino:
            return False
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False  # gone meanwhile, or not ours to look at
    for entry in environment.split(b"\0"):
        key, _, value = entry.partition(b"=")
        owner, _, started = value.partition(b":")
        if key == OWNER_VARIABLE.encode() and owner.isdigit() and started.isdigit():
            return not is_alive(int(owner), int(started))
    return False


class Reaper:
    """Reaps ended children that were handed to this process after `become_subreaper`, every `seconds` at most.

    Every Chromium hands on some; unreaped, each would hold a process id for as long as the job runs.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds, self._next = seconds, 0.0

    def reap(self, roles: Sequence[subprocess.Popen[bytes]]) -> None:
        """Do so if it is time; those in `roles` through their Popen, which keeps their exit code."""
        if time.monotonic() >= self._next:
            _reap(roles)
            self._next = time.monotonic() + self._seconds


def _reap(roles: Sequence[subprocess.Popen[bytes]]) -> None:
    for role in roles:
        role.poll()
    kept = {role.pid for role in roles}
    for child in psutil.Process().children():
        if child.pid not in kept:
            with suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)


def _name(pid: int) -> str:
    try:
        return f"{Path(f'/proc/{pid}/comm').read_text().strip()} ({pid})"
    except (FileNotFoundError, ProcessLookupError):
        return f"ended ({pid})"


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the third (state) on; empty if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return []
    return text.rpartition(")")[2].split()


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise ProcessError(f"prctl({option}, {value}) failed: {os.strerror(ctypes.get_errno())}")
