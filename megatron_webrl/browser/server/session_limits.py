"""Whether the limits of this machine and process allow the sessions that a browser server offers."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_webrl.config.setting import ConfigError

log = logging.getLogger(__name__)

# Measured with small pages, so lower bounds: a server that lacks them cannot lease all of its sessions.
TASKS_OF_SERVER, TASKS_PER_SESSION = 90, 15  # processes and threads: server, driver, Chromium with its renderers
FILES_OF_PROCESS, FILES_PER_SESSION = 64, 5  # of the server and of Chromium's browser process
ROOT_CAPABILITIES = 1 << 21 | 1 << 24  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE: the kernel ignores ulimit -u


def check_session_limits(sessions: int, max_connections: int) -> None:
    """Compare hard limits with the needs; warn if connections may run out of files. Raises ConfigError."""
    tasks = TASKS_OF_SERVER + TASKS_PER_SESSION * sessions
    for problem in (*pids_problems(tasks), *user_problems(tasks)):
        raise ConfigError(
            f"--sessions={sessions} needs {tasks} processes and threads, but {problem}; raise it, or lower --sessions"
        )
    files, (_, hard) = FILES_OF_PROCESS + FILES_PER_SESSION * sessions, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return
    if files > hard:
        raise ConfigError(
            f"--sessions={sessions} needs {files} open files of a process, but ulimit -Hn is {hard}; raise it "
            "(LimitNOFILE of systemd, docker run --ulimit), or lower --sessions"
        )
    if files + max_connections > hard:
        log.warning(
            "--max-connections=%d and --sessions=%d need %d open files, but ulimit -Hn is %d: connections may be "
            "refused without a reason; raise it, or lower --max-connections", max_connections, sessions,
            files + max_connections, hard,
        )  # fmt: skip


def pids_problems(
    tasks: int, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> list[str]:
    """For each control group of this process that is too small for more `tasks`: its limit. Reads cgroup v1 and v2."""
    problems = []
    for folder in _control_groups(groups, root):
        with suppress(OSError, ValueError):  # the root group has no limit, and "max" is none
            limit, used = int((folder / "pids.max").read_text()), int((folder / "pids.current").read_text())
            if used + tasks > limit:
                problems.append(
                    f"pids.max of {folder} is {limit}, of which {used} are used (TasksMax of systemd, docker run "
                    "--pids-limit, podPidsLimit of Kubernetes)"
                )
    return problems


def user_problems(tasks: int) -> list[str]:
    """Why `ulimit -u` is too low for more `tasks`; empty if it is not, or does not hold for this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    if hard == resource.RLIM_INFINITY or _has_capabilities():
        return []
    used = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            used += process.num_threads() if process.uids().real == os.getuid() else 0
    return [f"ulimit -u is {hard}, of which this user has {used} in use"] if used + tasks > hard else []


def _control_groups(groups: Path, root: Path) -> Iterator[Path]:
    """Folders of the group that limits processes, and of all groups that contain it."""
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        for mount in (root / "pids",) if controllers else (root, root / "unified"):
            group = mount / path.lstrip("/")
            # In a container the path may be that of the host, while the mount shows the container's group as its root.
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount) and folder.is_dir():
                    yield folder


def _has_capabilities() -> bool:
    status = Path("/proc/self/status").read_text()
    effective = next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff:"))
    return bool(int(effective, 16) & ROOT_CAPABILITIES)
