"""Find Chromium and build its launch arguments."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from playwright.async_api import ProxySettings

from megatron_webrl.browser.errors import BrowserMissing

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


def launch_arguments(closed_port: int, still_images: bool = False, trusted_key: str = "") -> list[str]:
    """Launch arguments for a small machine or a container, with the network blocked.

    Each context reaches the network through its `proxy_settings` only; traffic outside any context goes to a proxy at
    the local port `closed_port`, where nothing listens. Chromium itself resolves no names. With `still_images` animated
    images do not move. Certificates with `trusted_key`, a digest, are valid for all hosts.
    """
    return [
        *_ARGUMENTS,
        *([_STILL_IMAGES] if still_images else []),
        *([f"--ignore-certificate-errors-spki-list={trusted_key}"] if trusted_key else []),
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--proxy-server=http://127.0.0.1:{closed_port}",
        "--proxy-bypass-list=<-loopback>",
    ]


def proxy_settings(port: int) -> ProxySettings:
    """Proxy settings of a context: the egress proxy at the local port `port`, for loopback addresses too."""
    return {"server": f"http://127.0.0.1:{port}", "bypass": "<-loopback>"}


def use_sandbox() -> bool:
    """Whether to use Chromium's sandbox: not as root, because the sandbox refuses to start then."""
    return os.geteuid() != 0
