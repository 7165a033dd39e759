"""Finding Chromium, and the arguments it is launched with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping

from playwright.async_api import ProxySettings

from megatron_webrl.browser.egress.egress_policy import Endpoint
from megatron_webrl.browser.errors import BrowserMissing

EXECUTABLE_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
"""In order of preference: the headless shell starts three times as fast and takes a third of the memory."""

_FEATURES_OFF = (
    # A document's frame would be replaced before the old document ends: a dialog that opens in between takes no answer
    # and holds up the navigation for ever.
    "RenderDocument",
    # What Playwright turns off as well, whose list this one takes the place of.
    "HttpsFirstBalancedModeAutoEnable", "HttpsUpgrades", "MediaRouter", "NetworkTimeServiceQuerying",
    "OptimizationHints", "PaintHolding", "ThirdPartyStoragePartitioning", "Translate",
)  # fmt: skip

_ARGUMENTS = (
    "--disable-dev-shm-usage",  # /dev/shm belongs to the ring, and a killed browser leaves its files there
    "--disable-gpu",
    "--disable-smooth-scrolling",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--mute-audio",
    # To redraw only what has changed leaves edges that depend on when frames were drawn: equal pages would differ.
    "--disable-partial-raster",
    f"--disable-features={','.join(_FEATURES_OFF)}",
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
    for name in EXECUTABLE_NAMES:
        if found := shutil.which(name):
            return found
    raise BrowserMissing(
        f"no Chromium on PATH (looked for {', '.join(EXECUTABLE_NAMES)}); install Debian's package chromium-headless-shell, "
        "or set browser.executable"
    )


def launch_arguments(direct: Mapping[Endpoint, Endpoint], closed_port: int) -> list[str]:
    """Arguments for a small machine or a container, with all network shut off.

    A context gets its way out from `proxy_settings`; what belongs to no context is sent to a proxy at `closed_port` of
    this machine, where nothing listens. Chromium looks no name up itself but the hosts of `direct`.
    """
    rules = [f"MAP {endpoint} {target}" for endpoint, target in sorted(direct.items())]
    return [
        *_ARGUMENTS,
        f"--host-resolver-rules={', '.join([*rules, 'MAP * ~NOTFOUND', 'EXCLUDE 127.0.0.1'])}",
        f"--proxy-server=http://127.0.0.1:{closed_port}",
        "--proxy-bypass-list=<-loopback>",
    ]


def proxy_settings(port: int, direct: Iterable[Endpoint]) -> ProxySettings:
    """A context's way to the network: the gateway at `port` of this machine, past it only to `direct`, over HTTP."""
    past = [f"{scheme}://{endpoint}" for endpoint in sorted(direct) for scheme in ("http", "ws")]
    return {"server": f"http://127.0.0.1:{port}", "bypass": ",".join(["<-loopback>", *past])}


def use_sandbox() -> bool:
    """Whether Chromium's sandbox is used: always but for root, for whom it refuses to start."""
    return os.geteuid() != 0
