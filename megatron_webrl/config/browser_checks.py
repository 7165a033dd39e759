"""Check the settings of browsers and of the farm that serves them."""

from __future__ import annotations

import os
import shutil
from ipaddress import IPv4Network, IPv6Network, ip_network
from urllib.parse import urlsplit

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.limits import check_limits
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import LatencyConfig
from megatron_webrl.types import OPTIONAL_ACTION_KINDS, TAB_ACTION_KINDS

# Settings of browser.* that only the process with the browsers reads.
BROWSER_SERVER_SETTINGS = (
    "processes", "executable", "user", "reuse_pages", "open_web", "allow", "deny", "ports", "max_requests",
    "max_network_mib", "record", "replay", "replay_ignore",
)  # fmt: skip

DENIED_PLACES = "write hosts such as example.com or *.example.com, addresses, or networks such as 10.0.0.0/8"


def check_browser_server_config(config: Config) -> None:
    """The same for what a node of a browser farm takes of a configuration. Raises ConfigError."""
    check_limits(config, "")
    check_browser_settings(config)
    check_browser_user(config)


def check_browser_settings(config: Config) -> None:
    browser = config.browser
    for name in browser.actions:
        if name not in OPTIONAL_ACTION_KINDS:
            raise ConfigError(f"browser.actions={name} is not one of {', '.join(OPTIONAL_ACTION_KINDS)}")
    if set(browser.actions) & set(TAB_ACTION_KINDS) and "switch_tab" not in browser.actions:
        raise ConfigError(f"browser.actions={','.join(browser.actions)} has tabs but no switch_tab; add it")
    if browser.marks and config.trainer.warm_start.demonstrations:
        raise ConfigError(
            f"trainer.warm_start.demonstrations={config.trainer.warm_start.demonstrations}, but scripts act by "
            "coordinates; set demonstrations to 0, or browser.marks=false"
        )
    check_recording_settings(browser)
    for text in browser.deny:
        if "/" in text:
            parse_denied_network(text)
    if browser.reuse_pages and (browser.record or browser.replay):
        name = "record" if browser.record else "replay"
        raise ConfigError(
            f"browser.reuse_pages={browser.reuse_pages}, but with browser.{name} no page serves twice; set it to 0"
        )
    if browser.farm:
        _check_farm_settings(config)
    executable = browser.executable
    if executable and not shutil.which(executable):
        raise ConfigError(
            f"browser.executable={executable} is not an executable file; leave it empty to search for Chromium"
        )


def check_browser_user(config: Config) -> None:
    """Whether browsers may run as the user of this process. Raises ConfigError."""
    browser = config.browser
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


def check_recording_settings(browser: BrowserConfig) -> None:
    """Raises ConfigError for settings of recording and replay that contradict each other."""
    if browser.record and browser.replay:
        raise ConfigError(
            f"browser.record={browser.record} and browser.replay={browser.replay} are both set; leave one of them empty"
        )
    if browser.replay_ignore and not browser.replay:
        raise ConfigError(
            f"browser.replay_ignore={','.join(browser.replay_ignore)} has no effect without browser.replay; set that, "
            "or leave it out"
        )


def parse_farm_addresses(text: str) -> tuple[str, ...]:
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
            raise ConfigError(f"{part.strip()!r} is not an address such as http://node7:8700 (browser.farm)")
        found.append(address)
    return tuple(found)


def _check_farm_settings(config: Config) -> None:
    """With a farm some settings are those of its nodes: here they would have no effect. Raises ConfigError."""
    parse_farm_addresses(config.browser.farm)
    usual = BrowserConfig()
    for name in BROWSER_SERVER_SETTINGS:
        if (value := getattr(config.browser, name)) != getattr(usual, name):
            raise ConfigError(
                f"browser.{name}={value} has no effect with browser.farm={config.browser.farm}: its nodes have "
                "settings of their own; leave it out"
            )
    if config.tasks.latency != LatencyConfig():
        raise ConfigError(
            f"tasks.latency has no effect with browser.farm={config.browser.farm}: give it to the nodes instead"
        )
    if config.tasks.offline_websites:
        raise ConfigError(
            f"tasks.offline_websites has no effect with browser.farm={config.browser.farm}: give it to the nodes "
            "instead"
        )
