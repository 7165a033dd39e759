"""Engines that announce themselves, and engines that fail their weight transfers: when the job ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.model.platform import Platform
from megatron_webrl.trainer.weight_sync import MAX_FAILURES, WeightSyncer
from megatron_webrl.weights.engine_map import EngineSizes
from tests.job_control import connect, control_service


@pytest.mark.usefixtures("one_rank")
def test_one_look_at_the_announcements_finds_new_engines_and_whether_there_is_any(tmp_path: Path) -> None:
    with control_service(tmp_path) as address:
        control, worker = connect(address, "trainer-0"), connect(address, "rollout-0")
        syncer = WeightSyncer([], Config(), control, Platform("cpu", torch.device("cpu"), "gloo"))
        assert (syncer.has_new_engines(), syncer.has_engines()) == (False, False)
        announcement = {
            "link_id": "rollout-0.1.1",
            "instance_id": f"rollout-0.{worker.register_instance()}",
            "trainer": control.get_json("weights/trainer"),
            "nodes": ["node-0"],
            "sizes": asdict(EngineSizes()),
        }
        worker.put_json("engine/rollout-0", announcement)
        with mock.patch.object(control, "get_json", wraps=control.get_json) as read:
            assert (syncer.has_new_engines(), syncer.has_engines()) == (True, True)
        assert [each.args[0] for each in read.call_args_list].count("engine/rollout-0") == 1
        worker.register_instance()  # the worker has started again, and its engine is not there yet
        assert (syncer.has_new_engines(), syncer.has_engines()) == (False, False)


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
