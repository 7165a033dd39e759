"""Engines that fail their weight transfers: when the job ends."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_webrl.control.connection import JobFailed
from megatron_webrl.trainer.weight_sync import MAX_FAILURES, WeightSyncer


def test_a_job_ends_once_every_engine_has_reached_the_limit_of_failures_in_a_row():
    config = SimpleNamespace(worker_names=("rollout-0", "rollout-1"))
    syncer: Any = SimpleNamespace(config=config, _consecutive_failures=Counter())
    for _ in range(2 * MAX_FAILURES):
        WeightSyncer._count_failures(syncer, ["rollout-1"], {"rollout-0": "refused"})
    for _ in range(MAX_FAILURES - 1):
        WeightSyncer._count_failures(syncer, [], {"rollout-0": "refused", "rollout-1": "silent"})
    WeightSyncer._count_failures(syncer, ["rollout-1"], {})
    for _ in range(MAX_FAILURES - 1):
        WeightSyncer._count_failures(syncer, [], {"rollout-1": "silent"})
    with pytest.raises(JobFailed, match=f"failed {MAX_FAILURES} weight transfers in a row; rollout-1: silent"):
        WeightSyncer._count_failures(syncer, [], {"rollout-1": "silent"})
