"""Process of a browser server."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_webrl.browser.browser_pool import BrowserPool
from megatron_webrl.browser.errors import BrowserError
from megatron_webrl.browser.server.api import server_app
from megatron_webrl.browser.server.browser_server import BrowserServer
from megatron_webrl.browser.server.protocol import TOKEN_VARIABLE
from megatron_webrl.browser.server.task_catalog import TaskCatalog
from megatron_webrl.config.browser import check_browser_user
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, check_sections
from megatron_webrl.control.http.access import Token, read_token, reason_for_token
from megatron_webrl.control.http.http_service import ListenAddress, Listener, run_http_server, run_process

log = logging.getLogger(__name__)

# Measured with small pages, so lower bounds: a server that lacks them cannot lease all of its sessions.
TASKS_OF_SERVER, TASKS_PER_SESSION = 60, 15  # processes and threads: server, driver, Chromium with its renderers
FILES_OF_PROCESS, FILES_PER_SESSION = 64, 5  # of the server and of Chromium's browser process


def run_server(
    config_file: str | None, overrides: Sequence[str], address: ListenAddress, sessions: int,
    die_with_parent: bool, token_file: Path | None = None,
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises ConfigError.

    `token_file`: the clients' token; None: the environment has it.
    """
    if sessions < 1:
        raise ConfigError(f"--sessions={sessions} must be at least 1")
    needed = reason_for_token(address.host)
    token = read_token(TOKEN_VARIABLE, "--token-file", token_file, needed)
    config = parse_config(config_file, list(overrides))
    check_sections(config)
    check_browser_user(config.browser)
    check_session_limits(sessions)
    listener = Listener(address)
    return run_process("browser-server", _run(sessions, config, token, listener), die_with_parent)


async def _run(sessions: int, config: Config, token: Token | None, listener: Listener) -> int:
    catalog, timeout = TaskCatalog.from_config(config), config.rollout.operation_timeout_seconds
    try:
        async with (
            BrowserPool(config.browser, catalog.sites, sessions, timeout) as pool,
            BrowserServer(config, catalog, pool, sessions, listener.url) as server,
            run_http_server(server_app(server, token), listener) as ended,
        ):
            await ended.wait()
    except BrowserError as error:
        log.error("%s", error)
        return 1
    finally:
        catalog.close()
    return 1  # the HTTP server ended by itself


def check_session_limits(sessions: int) -> None:
    """Compare limits of this machine and process with the needs of the sessions. Raises ConfigError."""
    tasks = TASKS_OF_SERVER + TASKS_PER_SESSION * sessions
    for problem in pids_problems(tasks):
        raise ConfigError(
            f"--sessions={sessions} needs {tasks} processes and threads, but {problem}; raise it, or lower --sessions"
        )
    files, (_, hard) = FILES_OF_PROCESS + FILES_PER_SESSION * sessions, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and files > hard:
        raise ConfigError(
            f"--sessions={sessions} needs {files} open files of a process, but ulimit -Hn is {hard}; raise it "
            "(LimitNOFILE of systemd, docker run --ulimit), or lower --sessions"
        )


def pids_problems(
    tasks: int, groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[str]:
    """For each control group of this process that is too small for more `tasks`: its limit. Reads cgroup v1 and v2."""
    for line in groups.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        mount = root / "pids" if controllers else root
        group = mount / path.lstrip("/")
        # In a container the path may be that of the host, while the mount shows the container's group as its root.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            with suppress(OSError, ValueError):  # the root group has no limit, and "max" is none
                limit, used = int((folder / "pids.max").read_text()), int((folder / "pids.current").read_text())
                if used + tasks > limit:
                    yield (
                        f"pids.max of {folder} is {limit}, of which {used} are used (TasksMax of systemd, docker run "
                        "--pids-limit, podPidsLimit of Kubernetes)"
                    )
