"""The words that content is drawn from, and how to draw."""

from __future__ import annotations

import random
from datetime import date, timedelta
from itertools import product

from megatron_webrl.tasks.sites.app import Account, Start

FIRST = (
    "Mara", "Jonas", "Priya", "Tomas", "Elena", "Kofi", "Ingrid", "Rafael", "Noor", "Callum", "Yuki", "Anders",
    "Leila", "Marek", "Sofia", "Idris", "Hannah", "Bruno", "Thea", "Oscar", "Amara", "Viktor", "Nadia", "Felix",
)  # fmt: skip
LAST = (
    "Ashdown", "Bellweather", "Crane", "Dorsey", "Eklund", "Farrow", "Grieve", "Holloway", "Ibarra", "Jessop",
    "Kestrel", "Lindqvist", "Marlowe", "Novak", "Okafor", "Pemberton", "Quill", "Rosario", "Sandoval", "Thackeray",
)  # fmt: skip
_COLOURS = ("amber", "blue", "coral", "green", "ivory", "olive", "plum", "silver", "teal", "violet")
_ANIMALS = ("badger", "crane", "falcon", "heron", "lynx", "marten", "otter", "raven", "stoat", "wren")
TOWN_STARTS = ("Ald", "Bram", "Cor", "Dun", "Elm", "Fen", "Gar", "Hol", "Kel", "Lor", "Mar", "Nor", "Pen", "Ros", "Wen")
TOWN_ENDS = ("bury", "dale", "ford", "gate", "ham", "mere", "moor", "port", "stead", "wick")


def names(rng: random.Random, count: int) -> list[str]:
    """Different first and last names of people."""
    return [f"{first} {last}" for first, last in zip(rng.sample(FIRST, count), rng.sample(LAST, count), strict=True)]


def pairs(
    rng: random.Random, firsts: tuple[str, ...], seconds: tuple[str, ...], count: int, gap: str = " "
) -> list[str]:
    """Different combinations of two words."""
    return [first + gap + second for first, second in rng.sample(list(product(firsts, seconds)), count)]


def account(rng: random.Random) -> Account:
    """Somebody to sign in as."""
    first, last = rng.choice(FIRST), rng.choice(LAST)
    password = f"{rng.choice(_COLOURS)}-{rng.choice(_ANIMALS)}-{rng.randint(10, 99)}"
    return Account(f"{first.lower()}.{last.lower()}", password, f"{first} {last}")


def credentials(account: Account) -> str:
    """How an instruction begins that asks to sign in."""
    return f'Sign in as "{account.user}" with the password "{account.password}".'


def obstacles(rng: random.Random, signed_in: bool = False, popup: bool = False) -> Start:
    """The start of a harder task: in half of the cases with a bar, or a box, in the way."""
    banner = rng.random() < 0.5
    return Start(signed_in, banner, rng.choice((0, 2, 3)) if popup else 0)


def a_weekday(rng: random.Random) -> date:
    """A day from Monday to Friday of some year."""
    day = date(2025, 1, 6) + timedelta(days=rng.randrange(700))
    return day - timedelta(days=max(0, day.weekday() - 4))


def long_date(day: date) -> str:
    """Such as 5 March 2026."""
    return f"{day.day} {day:%B %Y}"
