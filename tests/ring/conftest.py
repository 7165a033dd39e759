from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from megatron_webrl.ring.ring import Ring
from megatron_webrl.ring.segment import SHM_FOLDER
from tests.ring.support import CAPACITY, PREFIX, RUN

_counter = itertools.count()


@pytest.fixture
def name() -> Iterator[str]:
    name = f"{PREFIX}{next(_counter)}"
    yield name
    (SHM_FOLDER / name).unlink(missing_ok=True)


@pytest.fixture
def ring(name: str) -> Iterator[Ring]:
    with Ring.create_or_attach(name, CAPACITY, RUN) as ring:
        yield ring
