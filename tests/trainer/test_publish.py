"""When the trainer stops waiting for engines that do not take their weights."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_webrl.control import JobFailed
from megatron_webrl.trainer.publish import STRIKES, Publisher


def test_a_job_ends_when_every_engine_failed_again_and_again_and_not_before():
    publisher: Any = SimpleNamespace(config=SimpleNamespace(workers=("rollout-0", "rollout-1")), _strikes=Counter())
    for _ in range(2 * STRIKES):
        Publisher._count(publisher, ["rollout-1"], {"rollout-0": "refused"})
    for _ in range(STRIKES - 1):
        Publisher._count(publisher, [], {"rollout-0": "refused", "rollout-1": "silent"})
    Publisher._count(publisher, ["rollout-1"], {})
    for _ in range(STRIKES - 1):
        Publisher._count(publisher, [], {"rollout-1": "silent"})
    with pytest.raises(JobFailed, match=f"in {STRIKES} transfers in a row; rollout-1: silent"):
        Publisher._count(publisher, [], {"rollout-1": "silent"})
