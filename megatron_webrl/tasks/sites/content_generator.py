"""Random content of the sites: names, accounts, dates."""

from __future__ import annotations

import random
from datetime import date, timedelta
from itertools import product

from megatron_webrl.tasks.sites.app import Account, InitialSiteState

FIRST_NAMES = (
    "Mara", "Jonas", "Priya", "Tomas", "Elena", "Kofi", "Ingrid", "Rafael", "Noor", "Callum", "Yuki", "Anders",
    "Leila", "Marek", "Sofia", "Idris", "Hannah", "Bruno", "Thea", "Oscar", "Amara", "Viktor", "Nadia", "Felix",
)  # fmt: skip
LAST_NAMES = (
    "Ashdown", "Bellweather", "Crane", "Dorsey", "Eklund", "Farrow", "Grieve", "Holloway", "Ibarra", "Jessop",
    "Kestrel", "Lindqvist", "Marlowe", "Novak", "Okafor", "Pemberton", "Quill", "Rosario", "Sandoval", "Thackeray",
)  # fmt: skip
_COLOURS = ("amber", "blue", "coral", "green", "ivory", "olive", "plum", "silver", "teal", "violet")
_ANIMALS = ("badger", "crane", "falcon", "heron", "lynx", "marten", "otter", "raven", "stoat", "wren")
TOWN_PREFIXES = (
    "Ald", "Bram", "Cor", "Dun", "Elm", "Fen", "Gar", "Hol", "Kel", "Lor", "Mar", "Nor", "Pen", "Ros", "Wen",
)  # fmt: skip
TOWN_SUFFIXES = ("bury", "dale", "ford", "gate", "ham", "mere", "moor", "port", "stead", "wick")


def draw_names(rng: random.Random, count: int) -> list[str]:
    """Names of people; no first or last name occurs twice."""
    return [
        f"{first} {last}"
        for first, last in zip(rng.sample(FIRST_NAMES, count), rng.sample(LAST_NAMES, count), strict=True)
    ]


def draw_pairs(
    rng: random.Random, firsts: tuple[str, ...], seconds: tuple[str, ...], count: int, separator: str = " "
) -> list[str]:
    """Distinct combinations of two words."""
    return [first + separator + second for first, second in rng.sample(list(product(firsts, seconds)), count)]


def draw_account(rng: random.Random) -> Account:
    first, last = rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES)
    password = f"{rng.choice(_COLOURS)}-{rng.choice(_ANIMALS)}-{rng.randint(10, 99)}"
    return Account(f"{first.lower()}.{last.lower()}", password, f"{first} {last}")


def sign_in_instruction(account: Account) -> str:
    """The first sentence of an instruction that needs sign-in."""
    return f'Sign in as "{account.user}" with the password "{account.password}".'


def draw_initial_state(rng: random.Random, signed_in: bool = False, popup: bool = False) -> InitialSiteState:
    """The initial state of a medium or hard task: half of them have a cookie banner, and with `popup` 2/3 a popup."""
    banner = rng.random() < 0.5
    return InitialSiteState(signed_in, banner, rng.choice((0, 2, 3)) if popup else 0)


def draw_weekday(rng: random.Random) -> date:
    """A weekday, from January 2025 on."""
    day = date(2025, 1, 6) + timedelta(days=rng.randrange(700))
    return day - timedelta(days=max(0, day.weekday() - 4))
