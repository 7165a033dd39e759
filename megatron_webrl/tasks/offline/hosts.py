"""Hosts of offline websites: a host name decides content, initial state and behaviour of its website."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from megatron_webrl.tasks.sites.app import App, InitialSiteState
from megatron_webrl.tasks.sites.site_task_source import ENVIRONMENTS, SITE_APPS

NUMBERS = range(10_000)  # of the websites of each site
DENYING_NUMBERS = range(9_000, 9_500)  # websites that deny access to everyone
MOODY_NUMBERS = range(9_500, 10_000)  # websites that deny access to half of their visitors
_HOST = re.compile(rf"({'|'.join(SITE_APPS)})-(0|[1-9][0-9]{{0,3}})\.localhost")
_GENERATORS = {entry.app_class.name: entry.generate_data for entry in ENVIRONMENTS.values()}


@dataclass(frozen=True)
class Website:
    """One website, as every visitor finds it."""

    host: str
    app_class: type[App]
    data: Any  # content of the site
    start: InitialSiteState
    denial_probability: float  # of a visitor


def website_host(site: str, number: int) -> str:
    """The host of a website. Raises ValueError for a number outside NUMBERS, KeyError for an unknown site."""
    if number not in NUMBERS:
        raise ValueError(f"website number {number} is not within 0..{NUMBERS.stop - 1}")
    return f"{SITE_APPS[site].name}-{number}.localhost"


def is_offline_host(host: str) -> bool:
    """Whether a host, in lower case, is that of an offline website."""
    return _HOST.fullmatch(host) is not None


def offline_host(url: str | None) -> str | None:
    """The host of a URL, if it is that of an offline website at its usual port, by HTTP; else None."""
    try:
        parts = urlsplit(url or "")
        usual = parts.scheme == "http" and parts.port in (None, 80)
    except ValueError:
        return None
    host = (parts.hostname or "").removesuffix(".")
    return host if usual and is_offline_host(host) else None


def get_website(host: str) -> Website:
    """The website of a host: a pure function of the name. Raises KeyError for another host."""
    if not is_offline_host(host):
        raise KeyError(host)
    return _make_website(host)


@lru_cache(maxsize=256)
def _make_website(host: str) -> Website:
    site, _, number = host.removesuffix(".localhost").partition("-")
    rng = random.Random(f"offline/{host}")
    data = _GENERATORS[site](rng)
    signed_in, banner = rng.random() < 0.5, rng.random() < 0.2
    popup_after_views = rng.choice((0, 0, 0, 0, 3))
    denial = 1.0 if int(number) in DENYING_NUMBERS else 0.5 if int(number) in MOODY_NUMBERS else 0.0
    return Website(host, SITE_APPS[site], data, InitialSiteState(signed_in, banner, popup_after_views), denial)


def page_key(host: str, path: str, query: Mapping[str, str]) -> str:
    """What identifies a page: host, path and query, without values that make no difference.

    Left out are empty values and page=1; parameters are sorted, and search words compared without case.
    """
    kept = sorted((name, value) for name, value in query.items() if value != "" and (name, value) != ("page", "1"))
    plain = [(name, " ".join(value.lower().split()) if name == "q" else value) for name, value in kept]
    return f"{host}{path}?{urlencode(plain)}" if plain else f"{host}{path}"


def page_key_of_path(host: str, path: str) -> str:
    """The same for a path with its query."""
    parts = urlsplit(path)
    return page_key(host, parts.path, dict(parse_qsl(parts.query)))
