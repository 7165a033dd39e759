"""Settings of browsers and of what pages may reach."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_network
from urllib.parse import urlsplit

from megatron_webrl.config.setting import ConfigError, setting
from megatron_webrl.types import OPTIONAL_ACTION_KINDS, TAB_ACTION_KINDS

# Settings that only the process with the browsers reads.
BROWSER_SERVER_SETTINGS = (
    "processes", "executable", "user", "reuse_pages", "open_web", "allow", "deny", "ports", "max_requests",
    "max_network_mib", "record", "replay", "replay_ignore", "cdp"
)  # fmt: skip
DENIED_PLACES = "write hosts such as example.com or *.example.com, addresses, or networks such as 10.0.0.0/8"


@dataclass
class BrowserConfig:
    servers: str = setting(
        "",
        "Addresses of browser servers, separated by commas; empty: workers start browser servers of their own.",
    )
    processes: int = setting(1, "Browser servers that each worker starts, processes with their own Chromium.", low=1)
    executable: str = setting("", "Chromium executable; empty: the first one on PATH, or Playwright's own build.")
    user: str = setting(
        "",
        "User as whom Chromium runs if this process is root, such as nobody; browser.open_web needs one then. root: "
        "accept that a page which breaks out of Chromium is root.",
    )
    width: int = setting(1280, "Viewport width, pixels.", low=32)
    height: int = setting(768, "Viewport height, pixels.", low=32)
    screenshot: str = setting("jpeg", "Encoding of screenshots.", choices=("jpeg", "png", "webp"))
    marks: bool = setting(
        False,
        "Set-of-Marks: number the visible elements, and act by number (web_interaction) instead of "
        "coordinates (computer_use).",
    )
    actions: list[str] = setting(
        [],
        "Additional actions: hover, double_click, right_click, drag, key, select_option, switch_tab, "
        "new_tab, close_tab.",
    )
    open_web: bool = setting(
        False, "Let pages reach public addresses; otherwise only the origins that the task source declares."
    )
    allow: list[str] = setting(
        [], "Public hosts that pages may reach: example.com, or *.example.com with all its subdomains; empty: all."
    )
    deny: list[str] = setting(
        [],
        "Hosts, addresses and networks (203.0.113.0/24) that pages may not reach, even if another setting permits "
        "them.",
    )
    ports: list[int] = setting([80, 443], "Ports of public hosts that pages may reach.")
    record: str = setting("", "Folder in which the HTTP responses of every episode are recorded; empty: none.")
    replay: str = setting("", "Folder of recorded episodes that answer requests instead of the network; empty: none.")
    replay_ignore: list[str] = setting(
        [],
        "Query parameters left out of the comparison of a request with recorded ones where nothing matches with "
        "them, such as _ or utm_*.",
        only_with="replay",
    )
    max_requests: int = setting(5000, "Requests of one episode; a TLS connection counts as one.", low=1)
    max_network_mib: int = setting(512, "Network traffic of one episode, both directions together.", low=1)
    reuse_pages: int = setting(
        0,
        "Pages kept after an episode for a later one of the same source, where the source permits it "
        "(MiniWoB++ restarts in place): less work than a fresh context. 0: every episode has a fresh "
        "context.",
        low=0,
    )

    cdp: bool = setting(
        False,
        "Give each episode a Chromium of its own, which a program on this machine can control over the Chrome DevTools "
        "Protocol, as agents of others do (docs/harness.md).",
    )

    def check(self) -> None:
        for name in self.actions:
            if name not in OPTIONAL_ACTION_KINDS:
                raise ConfigError(f"browser.actions={name} is not one of {', '.join(OPTIONAL_ACTION_KINDS)}")
        if set(self.actions) & set(TAB_ACTION_KINDS) and "switch_tab" not in self.actions:
            raise ConfigError(f"browser.actions={','.join(self.actions)} has tabs but no switch_tab; add it")
        if self.record and self.replay:
            raise ConfigError(
                f"browser.record={self.record} and browser.replay={self.replay} are both set; leave one of them empty"
            )
        for text in self.deny:
            if "/" in text:
                parse_denied_network(text)
        if self.reuse_pages and (self.record or self.replay):
            name = "record" if self.record else "replay"
            raise ConfigError(
                f"browser.reuse_pages={self.reuse_pages}, but with browser.{name} no page serves twice; set it to 0"
            )
        if self.cdp:
            for name in ("reuse_pages", "record", "replay"):
                if value := getattr(self, name):
                    raise ConfigError(
                        f"browser.{name}={value}, but with browser.cdp each episode has a Chromium of its own, which "
                        "another program controls; leave it out"
                    )
        if self.servers:
            self._check_servers()
        if self.executable and not shutil.which(self.executable):
            raise ConfigError(
                f"browser.executable={self.executable} is not an executable file; leave it empty to search for Chromium"
            )

    def _check_servers(self) -> None:
        parse_server_addresses(self.servers)
        usual = BrowserConfig()
        for name in BROWSER_SERVER_SETTINGS:
            if (value := getattr(self, name)) != getattr(usual, name):
                raise ConfigError(
                    f"browser.{name}={value} has no effect with browser.servers={self.servers}: they have settings of "
                    "their own; leave it out"
                )


def check_browser_user(browser: BrowserConfig) -> None:
    """Whether browsers may run as the user of this process. Raises ConfigError."""
    if os.geteuid() != 0 and browser.user:
        raise ConfigError(f"browser.user={browser.user} needs root, but this process is not root; leave it out")
    if os.geteuid() == 0 and browser.open_web and not browser.user:
        raise ConfigError(
            "browser.open_web=true, but this process is root, and so would be a page that breaks out of Chromium, "
            "which has no sandbox then; set browser.user=nobody or another user, run as another user, or set "
            "browser.user=root to accept it"
        )


def parse_denied_network(text: str) -> IPv4Network | IPv6Network:
    """A network on browser.deny. Raises ConfigError."""
    try:
        return ip_network(text)
    except ValueError as error:
        raise ConfigError(f"browser.deny contains {text!r}: {error}; {DENIED_PLACES}") from None


def parse_server_addresses(text: str) -> tuple[str, ...]:
    """The addresses of a setting, separated by commas. Raises ConfigError."""
    found = []
    for part in text.split(","):
        address = part.strip().rstrip("/")
        try:
            parts = urlsplit(address)
            plain = parts.scheme in ("http", "https") and parts.hostname and not (parts.path or parts.query)
            plain = plain and (parts.port is None or parts.port > 0)
        except ValueError:
            plain = False
        if not plain:
            raise ConfigError(f"{part.strip()!r} is not an address such as http://node7:8700 (browser.servers)")
        found.append(address)
    return tuple(found)
