"""Environments remember-sign-K-N: one of K signs on the first page, N pages without it, then a button for each sign.

Where a prompt has one screenshot, only what the policy noted can solve the last page. remember-sign-K-N-hidden never
shows the sign: its success is 1/K, whatever is learned. name-sign-K asks for the sign's name, on its only page.
match-sign-K-N has N pages with a sign and its buttons: each can be answered at once, and one wrong answer fails.
"""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

SCRIPT = "remember-sign"  # name of its scripted policy
PAGE = Path(__file__).with_suffix(".html")
PATH = f"/miniwob/{SCRIPT}.html"
HIDDEN = "-hidden"
NAME, MATCH = "name-sign-", "match-sign-"
ENVIRONMENTS = (
    *(f"{SCRIPT}-{k}-{n}{end}" for k, n, end in product((4, 8), (0, 1, 2, 4), ("", HIDDEN))),
    *(f"{NAME}{k}" for k in (4, 8)),
    *(f"{MATCH}4-{n}" for n in (1, 2, 4, 8)),
)


def page_address(environment: str) -> str:
    """Path and query of the page of an environment."""
    signs, *pages = re.findall(r"\d+", environment)
    end = "&name" * environment.startswith(NAME) + "&match" * environment.startswith(MATCH)
    end += "&hidden" * environment.endswith(HIDDEN)
    return f"{PATH}?signs={signs}&pages={''.join(pages) or 0}{end}"
