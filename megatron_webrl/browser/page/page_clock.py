"""Script that makes time and chance of a page repeatable, in recorded and in replayed episodes.

Pages put both into what they show and into the URLs they request. Each document begins at the time of the visit, and
its clock advances with its own timers and animation frames, not with the machine: a timer of 300 ms finds the clock
300 ms later, whenever it runs. So that loops that wait for the clock end, it also advances with the number of times
that it is read. Random numbers follow from a seed. `performance`, events, CSS and workers keep the machine's clock.
"""

from __future__ import annotations

import hashlib

from megatron_webrl.browser.page.tabs import page_script

_SCRIPT = page_script("page_clock")


def repeatable_page_script(task_id: str, clock_ms: int, seconds_ago: int) -> str:
    """The init script for the documents of an episode.

    `clock_ms`: unix time of the visit, milliseconds. `seconds_ago`: by which a replay moves dates in headers.
    The seed follows from the task: visits of one task make the same random choices.
    """
    seed = int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=4).digest(), "big") | 1
    return f"({_SCRIPT})({seed}, {clock_ms}, {seconds_ago * 1000})"
