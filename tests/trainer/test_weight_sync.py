"""Engines that fail their weight transfers: when the job ends."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from megatron_webrl.control.connection import JobFailed
from megatron_webrl.trainer.weight_sync import MAX_FAILURES, WeightSyncer


def test_a_job_ends_once_every_engine_has_reached_the_limit_of_failures_in_a_row():
    syncer: Any = object.__new__(WeightSyncer)  # no process groups
    syncer._workers, syncer._given_up, syncer._consecutive_failures = ("rollout-0", "rollout-1"), (), Counter()
    for _ in range(2 * MAX_FAILURES):
        syncer._count_failures(["rollout-1"], {"rollout-0": "refused"})
    for _ in range(MAX_FAILURES - 1):
        syncer._count_failures([], {"rollout-0": "refused", "rollout-1": "silent"})
    syncer._count_failures(["rollout-1"], {})
    for _ in range(MAX_FAILURES - 1):
        syncer._count_failures([], {"rollout-1": "silent"})
    with pytest.raises(JobFailed, match=f"failed {MAX_FAILURES} weight transfers in a row; rollout-1: silent"):
        syncer._count_failures([], {"rollout-1": "silent"})
