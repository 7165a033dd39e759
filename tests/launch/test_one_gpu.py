"""configs/tiny_1gpu.yaml as a whole job. Only a whole job shows that both roles take the same device and transport."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_webrl.launch.gpus import has_gpu
from tests.launch.whole_jobs import Job, assert_nothing_left

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]  # tests/checks/test_gpu.py runs the same job, shorter

CONFIG = Path(__file__).parents[2] / "configs" / "tiny_1gpu.yaml"
SMALL = (
    "trainer.updates=1", "trainer.minibatches=1", "trainer.groups_per_update=2", "rollout.group_size=2",
    "rollout.groups_in_flight=2", "evaluation.before=false",
    "evaluation.after=false", "browser.reuse_pages=4", "ring.capacity_mib=64",
)  # fmt: skip


def devices(job: Job, name: str) -> str | None:
    role = job.role(name)
    return role.environ().get("CUDA_VISIBLE_DEVICES") if role else None


def test_trainer_and_engine_of_the_tiny_model_share_what_the_machine_has(job: Job):
    job.start(*SMALL, config=CONFIG)
    for name in ("rollout-0", "trainer-0"):
        job.until(lambda name=name: devices(job, name) == "0", f"{name} on GPU 0")
    assert job.wait(240) == 0, job.output()
    assert ("no GPU on this machine" in job.output()) == (not has_gpu())
    summary = job.summary()
    assert summary["outcome"] == "finished"
    assert [update["version"] for update in summary["updates"]] == [1]
    assert summary["accounting"]["matches"]
    assert 0 < summary["accounting"]["trained"] <= 4
    assert summary["updates"][0]["logprob_mismatch_max"] <= 1e-3
    logs = {name: (job.run_folder / "logs" / f"{name}.log").read_text() for name in ("trainer-0", "rollout-0")}
    assert "they travel through the host's memory by gloo" in logs["trainer-0"]
    # Version 0 before the first episode and version 1 after the update, each with checksums (weights.verify).
    assert "version 0 in place" in logs["rollout-0"]
    assert "version 1 to 1 engines" in logs["trainer-0"]
    assert_nothing_left(job)
