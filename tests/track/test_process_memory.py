"""Private memory of a process and of its children."""

from __future__ import annotations

import subprocess
import sys

from megatron_webrl.track.process_memory import PeakMemory, private_gib
from tests.waiting import until

HOLDS = "data = bytearray(b'x') * (300 << 20); print('made', flush=True); input()"


def test_the_memory_of_children_counts_while_they_live_and_the_peak_stays() -> None:
    memory, own, before = PeakMemory(), private_gib(), private_gib(with_children=True)  # other tests may leave children
    assert 0 < own <= before
    child = subprocess.Popen([sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline()
    memory.measure()
    assert 0.29 < memory.gib - before < 0.5
    assert private_gib() < own + 0.2
    child.communicate(b"\n")
    until(lambda: private_gib(with_children=True) < before + 0.2, "the end of the child")
    largest = memory.gib
    memory.measure()
    assert memory.gib < before + 0.2
    assert memory.peak_gib == largest
