"""The lines "host syncs" of the section "one GPU": what PyTorch warns of is counted with its place."""

from __future__ import annotations

import warnings

import pytest
import torch

from megatron_webrl.checks.gpu_model import check_host_syncs, host_syncs

WARNING = "called a synchronizing CUDA operation"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str | int]:
    """The modes that are set, beginning with the one before; setting them needs a GPU."""
    found: list[str | int] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: found[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", found.append)
    return found


def read(times: int) -> None:
    """Warn as PyTorch does in mode "warn"."""
    for _ in range(times):
        warnings.warn(WARNING, stacklevel=2)


def test_each_host_sync_is_counted_at_its_place(modes: list[str | int]) -> None:
    def work() -> None:
        assert modes[-1] == "warn"
        warnings.warn("something else", stacklevel=1)
        read(3)
        read(1)

    assert sorted(host_syncs(work).values()) == [1, 3]
    assert modes == [0, "warn", 0]


def test_the_mode_is_restored_after_a_failure(modes: list[str | int]) -> None:
    def work() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        host_syncs(work)
    assert modes == [0, "warn", 0]


@pytest.mark.usefixtures("modes")
def test_a_pass_that_waits_fails_with_the_place() -> None:
    assert check_host_syncs("dense", lambda: read(0)).status == "passed"
    found = check_host_syncs("dense", lambda: read(2))
    assert (found.status, found.value) == ("failed", 2)
    assert found.note.startswith("test_gpu_host_syncs.py:")
    assert found.note.endswith(" (2)")
