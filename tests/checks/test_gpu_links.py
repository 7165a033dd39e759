"""Faults of the section "links"."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch.distributed as dist

from megatron_webrl.checks.gpu_links import LinkCase, check_fault


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_error_counts_only_if_the_fault_has_struck(side: str, number: signal.Signals) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    case = LinkCase(store.port, "struck", "cpu", "cpu", 2**12, 2.0, faulty=side, signal=int(number))
    struck = check_fault(case)
    assert struck.status == "passed", struck.note
    absent = check_fault(replace(case, name="absent", join_seconds=1.0, **{side: "no device"}))
    assert absent.status == "failed"
    assert absent.note.startswith(f"the {side} was not {'stopped' if number == signal.SIGSTOP else 'killed'}; the ")
    assert "did not join within 1 s" in absent.note
