"""Finding Chromium, and the arguments it is launched with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from megatron_webrl.browser.errors import BrowserMissing

CANDIDATES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""In order of preference: the headless shell starts three times as fast and takes a third of the memory."""

_ARGUMENTS = (
    "--disable-dev-shm-usage",  # /dev/shm belongs to the ring, and a killed browser leaves its files there
    "--disable-gpu",
    "--disable-smooth-scrolling",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    "--force-device-scale-factor=1",
    # Pages must not find a way around the proxy through peer connections.
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
)


def find_chromium(executable: str = "") -> str:
    """Path of the Chromium to run: `executable` (browser.executable), else the first of CANDIDATES on PATH.

    Raises BrowserMissing.
    """
    if executable:
        found = shutil.which(executable)
        if not found:
            raise BrowserMissing(
                f"browser.executable={executable} is not an executable file; leave it empty to search PATH"
            )
        return found
    for name in CANDIDATES:
        if found := shutil.which(name):
            return found
    raise BrowserMissing(
        f"no Chromium on PATH (looked for {', '.join(CANDIDATES)}); install Debian's package chromium-headless-shell, "
        "or set browser.executable"
    )


def launch_arguments(origins: Iterable[str], addresses: Mapping[str, str], closed_port: int) -> list[str]:
    """Arguments for a small machine or a container, with all network but `origins` shut off.

    `addresses` tells where host names lead to, as in `Site.addresses`.

    Every other request is sent to a proxy at `closed_port` of this machine, where nothing listens. Unlike
    intercepting requests one by one this costs nothing per request, and it holds for workers, sockets and pop-ups.
    """
    allowed = ";".join(sorted(f"{urlsplit(origin).scheme}://{urlsplit(origin).netloc}" for origin in origins))
    rules = ", ".join(f"MAP {host} {address}" for host, address in sorted(addresses.items()))
    return [
        *_ARGUMENTS,
        *([f"--host-resolver-rules={rules}"] if rules else []),
        f"--proxy-server=http://127.0.0.1:{closed_port}",
        f"--proxy-bypass-list=<-loopback>;{allowed}",
    ]


def sandboxed() -> bool:
    """Whether Chromium's sandbox is used: always but for root, for whom it refuses to start."""
    return os.geteuid() != 0
