"""Values by name in arrays, compared with a dictionary."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron_webrl.tasks.sampler.compact_map import CompactMap
from megatron_webrl.tasks.sampler.knowledge import PASS, Entry, PassRate, SamplerLog

NAMES = st.sampled_from(["a", "b", "shop.example", "bücher.example", "0123456789abcdef", "a" * 40])
CHANGES = st.lists(st.dictionaries(NAMES, st.none() | st.floats(allow_nan=False)), max_size=6)


@given(CHANGES)
def test_a_compact_map_holds_what_a_dictionary_would(changes: list[dict[str, float | None]]) -> None:
    found, expected = CompactMap(np.dtype(np.float64), float), {}
    for each in changes:
        before = dict(found.items())
        later = found.updated(each)
        assert dict(found.items()) == before
        found = later
        expected = {name: value for name, value in (expected | each).items() if value is not None}
        assert dict(found.items()) == expected
        assert len(found) == len(expected)
        assert all(
            found.get(name) == expected.get(name) for name in ("a", "b", "c", "a" * 40, "a" * 50, "bücher.example")
        )
        assert sorted(found.names.tolist()) == found.names.tolist()


def test_the_base_of_a_log_takes_a_quarter_of_what_a_dictionary_takes() -> None:
    tracemalloc.start()
    log = SamplerLog(100_000)
    log.add_folded(Entry(100_000, PASS, f"{number:016x}", [number / 100_000, 2]) for number in range(100_000))
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 5 * 2**20
    assert log.at(100_000).pass_rate(f"{50_000:016x}") == 0.5
    assert log.passes.get(f"{99_999:016x}", log.end) == PassRate(0.99999, 2)
    assert log.passes.get("f" * 16, log.end) is None
