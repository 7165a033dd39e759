"""Settings of browsers and of what pages may reach."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.setting import setting


@dataclass
class BrowserConfig:
    farm: str = setting(
        "",
        "Addresses of a browser farm's routers or servers, separated by commas; empty: workers start "
        "browser servers of their own.",
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
    quality: int = setting(80, "Quality of JPEG and WebP.", low=1, high=100)
    marks: bool = setting(
        False,
        "Set-of-Marks: number the visible elements, and act by number (web_interaction) instead of "
        "coordinates (computer_use).",
    )
    max_marks: int = setting(100, "Elements numbered in one observation.", low=1)
    actions: list[str] = setting(
        [],
        "Additional actions: hover, double_click, right_click, drag, key, select_option, switch_tab, "
        "new_tab, close_tab.",
    )
    tabs: int = setting(5, "Tabs open at a time; always one without switch_tab in browser.actions.", low=2)
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
