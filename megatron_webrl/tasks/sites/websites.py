"""Offline websites: many hosts with the pages of the sites, for tasks that begin at a URL.

A host decides content, initial state and behaviour of its website. Its pages have a bar code, which says which page a
screenshot shows, and what has been done there: a strip of 16 x 4 black and white cells of 8 x 8 pixels at the bottom
right of the viewport, above everything else. 64 bits, from the top left, row by row, white is 1:

    4 format | 32 page digest | 16 effects digest | 3 reserved, 0 | 1 access denied | 8 checksum of the other 56
"""

from __future__ import annotations

import binascii
import hashlib
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from megatron_webrl.tasks.sites.app import App, Effect, InitialSiteState
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


@lru_cache(maxsize=256)
def get_website(host: str) -> Website:
    """The website of a host: a pure function of the name. Raises KeyError for another host."""
    if not is_offline_host(host):
        raise KeyError(host)
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


COLUMNS, ROWS, CELL_PIXELS = 16, 4, 8
FORMAT = 0b1010


@dataclass(frozen=True)
class BarCode:
    """The content of a bar code."""

    page: int  # `page_digest`
    effects: int  # `effects_digest`
    denied: bool = False  # the website has refused the agent

    def to_bytes(self) -> bytes:
        """The 64 bits."""
        value = (((FORMAT << 32 | self.page) << 16 | self.effects) << 4) | int(self.denied)
        content = value.to_bytes(7, "big")
        return content + bytes([binascii.crc_hqx(content, 0x5A) & 0xFF])  # not 0: plain areas of a colour do not pass


def page_digest(page: str) -> int:
    """32 bits of a page's key: host, path and query."""
    return digest(page, 4)


def effects_digest(effects: Iterable[Effect]) -> int:
    """16 bits of a multiset of effects; 0 if there are none."""
    listed = sorted("\x1f".join(effect) for effect in effects)
    return (digest("\x1e".join(listed), 2) or 1) if listed else 0


def draw_bar_code(code: BarCode) -> str:
    """The bar code as SVG that takes no clicks and that assistive technology does not see."""
    bits = "".join(f"{byte:08b}" for byte in code.to_bytes())
    path = "".join(f"M{n % COLUMNS} {n // COLUMNS}h1v1h-1z" for n, bit in enumerate(bits) if bit == "0")
    width, height = COLUMNS * CELL_PIXELS, ROWS * CELL_PIXELS
    return (
        '<svg aria-hidden="true" style="position:fixed;right:0;bottom:0;z-index:2147483647;pointer-events:none" '
        f'width="{width}" height="{height}" viewBox="0 0 {COLUMNS} {ROWS}" shape-rendering="crispEdges">'
        f'<rect width="{COLUMNS}" height="{ROWS}" fill="#fff"/><path d="{path}" fill="#000"/></svg>'
    )


def digest(text: str, size: int) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")
