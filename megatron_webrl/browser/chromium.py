"""A Chromium with its Playwright driver: find it, launch it, measure and limit its memory, end it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
from playwright._impl import transport
from playwright._impl._driver import get_driver_env
from playwright.async_api import Browser, BrowserContext, CDPSession, Playwright, ProxySettings, async_playwright
from playwright.async_api import Error as PlaywrightError

from megatron_webrl.browser.errors import BrowserCrashed, BrowserMissing
from megatron_webrl.browser.isolation import Isolation
from megatron_webrl.control import child_process
from megatron_webrl.util.text import first_line

log = logging.getLogger(__name__)

EXECUTABLE_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""In order of preference: the headless shell starts three times as fast and uses a third of the memory."""
PLAYWRIGHT_BUILDS = ("chromium_headless_shell-*/*/chrome-headless-shell", "chromium-*/*/chrome")
"""Where `playwright install` puts its own builds, in the same order."""
_FEATURES_OFF = (
    # It replaces a frame before the old document ends: a dialog in between has no answer and blocks the navigation.
    "RenderDocument",
    # This list replaces Playwright's own; these entries are copied from it.
    "HttpsFirstBalancedModeAutoEnable", "HttpsUpgrades", "MediaRouter", "NetworkTimeServiceQuerying",
    "OptimizationHints", "PaintHolding", "ThirdPartyStoragePartitioning", "Translate",
)  # fmt: skip
_ARGUMENTS = (
    "--disable-dev-shm-usage",  # /dev/shm is for the ring, and a killed browser leaves its files there
    "--disable-gpu",
    "--disable-smooth-scrolling",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    "--disable-partial-raster",  # edges of partial redraws depend on timing: equal pages would differ in pixels
    f"--disable-features={','.join(_FEATURES_OFF)}",
    "--force-device-scale-factor=1",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",  # peer connections must not bypass the proxy
)
# Animated images show their first picture. The flag replaces Playwright's own, whose other entries are copied from it.
_STILL_IMAGES = (
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4,"
    "imageAnimationPolicy=2"
)
STOP_SECONDS = 15.0
# What Node.js, Chromium and their libraries read. Others may hold keys and tokens, which no page may reach.
PASSED_VARIABLES = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|LD_LIBRARY_PATH|LD_PRELOAD|DISPLAY|DBUS_SESSION_BUS_ADDRESS"
    r"|XDG_\w+|FONTCONFIG_\w+|SSL_CERT_\w+|CHROME_\w+|PW_\w+|PLAYWRIGHT_\w+|NODE_OPTIONS"
)
_environment: ContextVar[dict[str, str]] = ContextVar("environment of the next driver")
START_SECONDS = 60.0
CLOSE_SECONDS = 15.0
PING_SECONDS = 10.0
MAX_FAILED_PINGS = 2  # in a row before a browser counts as hung: a pause of this process may delay one answer


def find_chromium(executable: str = "") -> str:
    """Path of `executable` (browser.executable), else of the first Chromium that this machine has.

    That is Playwright's own build in PLAYWRIGHT_BROWSERS_PATH, if the variable is set; else the first of
    EXECUTABLE_NAMES on PATH; else Playwright's own build in its default folder. Raises BrowserMissing.
    """
    if executable:
        path = shutil.which(executable)
        if not path:
            raise BrowserMissing(
                f"browser.executable={executable} is not an executable file; leave it empty to search for Chromium"
            )
        return path
    folder = os.environ.get("PLAYWRIGHT_BROWSERS_PATH", "")
    if folder and (path := _playwright_build(Path(folder))):
        return path
    for name in EXECUTABLE_NAMES:
        if path := shutil.which(name):
            return path
    default = Path("~/.cache/ms-playwright").expanduser()
    if path := _playwright_build(default):
        return path
    raise BrowserMissing(
        f"no Chromium on PATH ({', '.join(EXECUTABLE_NAMES)}) or in {folder or default}; install Debian's package "
        "chromium-headless-shell, run `playwright install chromium-headless-shell`, or set browser.executable"
    )


def _playwright_build(folder: Path) -> str | None:
    """The newest of Playwright's Chromium builds in `folder`, by the revision in their names; None without one."""
    for pattern in PLAYWRIGHT_BUILDS:
        builds = [path for path in folder.glob(pattern) if os.access(path, os.X_OK)]
        if builds:
            return str(max(builds, key=lambda path: int(path.parents[1].name.rsplit("-", 1)[1])))
    return None


def launch_arguments(proxy_port: int, still_images: bool = False, trusted_key: str = "") -> list[str]:
    """Launch arguments for a small machine or a container, with the network blocked.

    Each context reaches the network through its `proxy_settings` only, traffic outside any context through a proxy at
    the local port `proxy_port`: nothing listens there, unless the browser has one context only. Chromium itself
    resolves no names. With `still_images` animated images do not move. Certificates with `trusted_key`, a digest, are
    valid for all hosts.
    """
    return [
        *_ARGUMENTS,
        *([_STILL_IMAGES] if still_images else []),
        *([f"--ignore-certificate-errors-spki-list={trusted_key}"] if trusted_key else []),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--proxy-server=http://127.0.0.1:{proxy_port}",
        "--proxy-bypass-list=<-loopback>",
    ]


def proxy_settings(port: int) -> ProxySettings:
    """Proxy settings of a context: the egress proxy at the local port `port`, for loopback addresses too."""
    return {"server": f"http://127.0.0.1:{port}", "bypass": "<-loopback>"}


def use_sandbox() -> bool:
    """Whether to use Chromium's sandbox: not as root, because the sandbox refuses to start then."""
    return os.geteuid() != 0


def _driver_environment() -> dict[str, str]:
    passed = {name: value for name, value in get_driver_env().items() if PASSED_VARIABLES.fullmatch(name)}
    return {**passed, **_environment.get({})}


async def _start_playwright(folder: Path) -> Playwright:
    """Start a driver with a temporary folder of its own. Raises BrowserCrashed.

    The environment names this process as owner: what outlives it, `sweep_orphans` and `sweep_scratch` remove.
    """
    # Playwright has no setting; os.environ would affect other children.
    transport.get_driver_env = _driver_environment
    # Pages must not depend on the machine's time zone.
    token = _environment.set({**child_process.owner_environment(), "TMPDIR": str(folder), "TZ": "UTC"})
    try:
        return await async_playwright().start()
    except Exception as error:  # Playwright has no class of its own for a driver that ends while it starts
        raise BrowserCrashed(f"the browser's driver does not start: {error}") from error
    finally:
        _environment.reset(token)


async def _stop_playwright(playwright: Playwright | None, folder: Path, graceful: bool) -> None:
    """End a driver and its child processes, and remove its folder."""
    stopping = asyncio.ensure_future(playwright.stop()) if playwright is not None else None
    try:
        if not graceful:
            await asyncio.to_thread(_kill_driver, folder)
        if stopping is not None:
            async with asyncio.timeout(STOP_SECONDS):
                await stopping
    except (PlaywrightError, TimeoutError) as error:
        log.warning("the browser's driver did not stop gracefully: %s", error or f"{STOP_SECONDS} s")
    finally:
        await asyncio.to_thread(_kill_driver, folder)
        await asyncio.to_thread(_remove, folder)


def _remove(folder: Path | None) -> None:
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _kill_driver(folder: Path) -> None:
    """Kill the processes with this TMPDIR, which are a driver and its child processes, and their process groups."""
    groups = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get("TMPDIR") == str(folder):
                groups.add(child_process.process_group(process.pid))
                process.kill()
    for group in groups - {0, os.getpgrp()}:
        child_process.kill_process_group(group)


class Chromium:
    """Browser and driver, started and ended together; after a crash either may be gone."""

    def __init__(
        self, playwright: Playwright, browser: Browser, control: CDPSession, pid: int, folder: Path, home: Path | None
    ) -> None:
        """`pid` of the browser process; `folder` of the driver; `home` of the browser, if it runs isolated."""
        self.browser, self.pid = browser, pid
        self.context: BrowserContext | None = None  # the only one, of a Chromium for one episode
        self.cdp_port = 0  # at which that one is controlled
        self.resident_mib = 0.0  # at the latest measurement, driver included
        self._launched_mib = 0.0  # after the launch
        self._playwright, self._control, self._folder, self._home = playwright, control, folder, home
        self._connected = True
        self._group = os.getpgid(pid)  # its leader may be a shell script: Debian's chromium is one
        self._group_started = child_process.start_time(self._group)
        self._driver = psutil.Process(psutil.Process(self._group).ppid())
        self._pidfd: int | None = None  # of the driver

    @classmethod
    async def launch(
        cls, executable: str, arguments: list[str], page_mib: int, isolation: Isolation | None = None,
        only_context: Mapping[str, Any] | None = None,
    ) -> Chromium:  # fmt: skip
        """Start both within START_SECONDS; each renderer may use `page_mib` MiB. Raises BrowserCrashed.

        `only_context`: options of its only context, for one episode; other programs can control it at `cdp_port`.
        Cancellation leaves nothing behind.
        """
        started, playwright = time.monotonic(), None
        home = isolation.make_home(executable) if isolation is not None else None
        folder = child_process.make_scratch_folder()
        try:
            async with asyncio.timeout(START_SECONDS):
                playwright = await _start_playwright(folder)
                options: dict[str, Any] = {
                    "executable_path": executable if home is None else home / "chromium",
                    "args": arguments,
                    "chromium_sandbox": use_sandbox() or isolation is not None,
                    "handle_sigint": False, "handle_sigterm": False, "handle_sighup": False,  # this process closes it
                    "timeout": START_SECONDS * 1000,
                }  # fmt: skip
                context = None
                if only_context is None:
                    browser = await playwright.chromium.launch(**options)
                else:
                    options["args"] = [*arguments, "--remote-debugging-port=0"]
                    context = await playwright.chromium.launch_persistent_context(
                        folder / "profile", **options, **only_context
                    )
                    assert context.browser is not None
                    browser = context.browser
                control = await browser.new_browser_cdp_session()
                processes = (await control.send("SystemInfo.getProcessInfo"))["processInfo"]
                pid = next(int(process["id"]) for process in processes if process["type"] == "browser")
                chromium = cls(playwright, browser, control, pid, folder, home)
                if context is not None:
                    profile = (folder if home is None else home) / "profile"
                    chromium.context = context
                    chromium.cdp_port = int((profile / "DevToolsActivePort").read_text().split()[0])
                await asyncio.to_thread(limit_page_memory, chromium.pid, page_mib)
                await asyncio.to_thread(chromium.measure_memory)
                chromium._launched_mib = chromium.resident_mib
        except BaseException as error:
            await _stop_playwright(playwright, folder, graceful=False)
            await asyncio.to_thread(_remove, home)
            if not isinstance(error, PlaywrightError | TimeoutError | ProcessLookupError | psutil.NoSuchProcess):
                raise
            reason = f"not started within {START_SECONDS} s" if isinstance(error, TimeoutError) else first_line(error)
            raise BrowserCrashed(f"{executable} does not start: {reason}") from error
        log.info("launched %s in %.2f s", executable, time.monotonic() - started)
        return chromium

    @property
    def alive(self) -> bool:
        """Whether driver and browser are connected."""
        return self._connected and self.browser.is_connected()

    @property
    def growth_mib(self) -> float:
        """Growth of the resident memory since the launch, at the latest measurement."""
        return self.resident_mib - self._launched_mib

    def on_exit(self, callback: Callable[[str], None]) -> None:
        """Call `callback` with the reason when the browser or the driver ends; possibly once for each."""
        loop = asyncio.get_running_loop()

        def on_driver_exit() -> None:
            self._stop_watching()
            self._connected = False
            callback("the browser's driver has ended")

        self.browser.on("disconnected", lambda browser: callback("Chromium has ended"))
        try:
            self._pidfd = os.pidfd_open(self._driver.pid)  # Playwright reports the end only to pending calls
            loop.add_reader(self._pidfd, on_driver_exit)
        except ProcessLookupError:
            loop.call_soon(on_driver_exit)
        if not self.browser.is_connected():
            loop.call_soon(callback, "Chromium has ended")

    async def is_responsive(self) -> bool:
        """Whether the browser's main thread answers a ping."""
        for _ in range(MAX_FAILED_PINGS):
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._control.send("Browser.getVersion")
                return True
            except TimeoutError:
                continue
            except PlaywrightError:  # it has ended; the event may arrive later
                self._connected = False
                return False
        return False

    def measure_memory(self) -> None:
        """Update `resident_mib`. Takes milliseconds per process."""
        with suppress(psutil.NoSuchProcess):
            processes = [self._driver, *self._driver.children(recursive=True)]
            self.resident_mib = resident_mib(process.pid for process in processes)

    async def close(self, *, graceful: bool = True) -> None:
        """End both, gracefully for at most CLOSE_SECONDS, then by SIGKILL."""
        graceful = graceful and self.alive
        try:
            if graceful:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self.browser.close()
        except (PlaywrightError, TimeoutError) as error:
            graceful = False
            log.warning("Chromium did not close gracefully: %s", error or f"{CLOSE_SECONDS} s")
        finally:
            self._stop_watching()
            if not graceful:
                await asyncio.to_thread(self._kill)
            await _stop_playwright(self._playwright, self._folder, graceful)
            await asyncio.to_thread(self._kill)
            await asyncio.to_thread(_remove, self._home)

    def _kill(self) -> None:
        if child_process.start_time(self._group) in (0, self._group_started):  # else the id was reused
            child_process.kill_process_group(self._group)

    def _stop_watching(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


def resident_mib(pids: Iterable[int]) -> float:
    """Total proportional set size; for a process that must not be inspected (sandboxed renderer) its private memory."""
    return sum(_proportional(pid) for pid in pids) / 2**20


def _proportional(pid: int) -> int:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        try:
            return process.memory_full_info().pss
        except psutil.AccessDenied:
            memory = process.memory_info()
            return memory.rss - memory.shared
    return 0


def limit_page_memory(browser: int, mib: int) -> int:
    """Limit each renderer process to `mib` MiB; returns the number of zygote processes limited.

    `browser`: id of Chromium's browser process. Renderers are forked from zygotes and inherit their limits. RLIMIT_DATA
    counts private writable memory, not shared memory or reserved address space, of which V8 takes a terabyte.
    """
    limited = 0
    for child in psutil.Process(browser).children(recursive=True):
        try:
            if "--type=zygote" in child.cmdline():
                child.rlimit(psutil.RLIMIT_DATA, (mib << 20, mib << 20))
                limited += 1
        except psutil.NoSuchProcess:
            continue  # a helper process that has ended
        except psutil.AccessDenied:
            log.warning("cannot limit the memory of pages: no permission for process %d", child.pid)
    return limited
