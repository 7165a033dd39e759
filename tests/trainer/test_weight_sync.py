"""When the trainer stops waiting for engines that do not take their weights."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_webrl.control.control_plane import JobFailed
from megatron_webrl.trainer.weight_sync import MAX_FAILURES, WeightSyncer


def test_a_job_ends_when_every_engine_failed_again_and_again_and_not_before():
    publisher: Any = SimpleNamespace(config=SimpleNamespace(workers=("rollout-0", "rollout-1")), _strikes=Counter())
    for _ in range(2 * MAX_FAILURES):
        WeightSyncer._count(publisher, ["rollout-1"], {"rollout-0": "refused"})
    for _ in range(MAX_FAILURES - 1):
        WeightSyncer._count(publisher, [], {"rollout-0": "refused", "rollout-1": "silent"})
    WeightSyncer._count(publisher, ["rollout-1"], {})
    for _ in range(MAX_FAILURES - 1):
        WeightSyncer._count(publisher, [], {"rollout-1": "silent"})
    with pytest.raises(JobFailed, match=f"in {MAX_FAILURES} transfers in a row; rollout-1: silent"):
        WeightSyncer._count(publisher, [], {"rollout-1": "silent"})
