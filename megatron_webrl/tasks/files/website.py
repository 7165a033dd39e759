"""The start page of a row, and the website that it belongs to."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

EXPECTED = "a web address such as example.com or https://example.com/start"
LOCAL_SUFFIX = ".localhost"  # hosts that a browser server serves itself
_ADDRESS = re.compile(
    r"(?:(https?)://)?([^\s/?#@:\\]+)(?::([0-9]{1,5}))?(?:[/?#][^\s\\\x00-\x1f\x7f]*)?", re.IGNORECASE
)
_HOST = re.compile(r"(?:[a-z0-9_-]{1,63}\.)+[a-z0-9_-]{1,63}")


class StartPage(NamedTuple):
    """Where a task begins."""

    url: str
    website: str  # its host: lower case, A-labels, without a leading "www."


@functools.lru_cache(maxsize=4096)
def parse_website(text: str) -> StartPage:
    """The start page that a field `website` names; without a scheme it is https, for local hosts http. Raises
    ValueError.
    """
    text = text.strip()
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match[3] or 443) < 65536:
        raise ValueError(text)
    host = _canonical_host(match[2].removesuffix("."))
    website = host.removeprefix("www.")
    website = website if "." in website else host
    scheme = "https" if is_public(website) else "http"
    return StartPage(text if match[1] else f"{scheme}://{text}", website)


def is_public(website: str) -> bool:
    """Whether the pages of a website come from the network."""
    return website != LOCAL_SUFFIX[1:] and not website.endswith(LOCAL_SUFFIX)


def _canonical_host(host: str) -> str:
    if not host.isascii():
        import idna  # of the browsers' extra; few hosts need it

        host = idna.encode(idna.uts46_remap(host, std3_rules=False, transitional=False)).decode()
    host = host.lower()
    if len(host) > 253 or not (_HOST.fullmatch(host) or host == LOCAL_SUFFIX[1:]):
        raise ValueError(host)
    return host
