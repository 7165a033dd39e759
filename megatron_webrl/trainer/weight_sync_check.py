"""A trial of the weight path alone: the model goes to all engines a few times, for `webrl doctor --weights`."""

from __future__ import annotations

import json
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control.control_plane import ControlClient, JobFailed
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.system import torchvision_shim
from megatron_webrl.trainer import parallel
from megatron_webrl.trainer.factory import make_learner
from megatron_webrl.trainer.parallel import RankInfo
from megatron_webrl.trainer.weight_sync import WeightSyncer

TRANSFER_COUNT = 4
"""The first one includes what is done once; the last ones show the speed."""


def run(config: Config, control: ControlClient, rank: RankInfo, node_ring: NodeRing) -> None:
    """Run one trainer rank of the trial. Raises JobFailed naming an engine that did not take its weights."""
    torchvision_shim.install()
    control.start_heartbeat()
    control.report_status("loading the model")
    platform = parallel.initialize(config, rank, control.store, f"{node_ring.job_id}/weight_sync_check")
    learner = make_learner(config, platform)
    control.report_status("waiting for the engines")
    publisher = WeightSyncer(learner.models, config, control, platform)
    transfers = []
    for version in range(TRANSFER_COUNT):
        control.report_status(f"transfer {version + 1} of {TRANSFER_COUNT}")
        seconds = publisher.sync(version)
        if publisher.failures:
            worker, reason = next(iter(publisher.failures.items()))
            raise JobFailed(f"{worker} did not take transfer {version + 1}: {reason}")
        transfers.append({"seconds": seconds, **publisher.last_transfer_metrics()})
    control.report_status("looking at the engines' memory")
    engines = _look(config, control, publisher)
    if rank.rank == 0:
        report = {"transfers": transfers, "engines": engines, "bytes_by_sender": publisher.bytes_by_sender()}
        (config.run_folder / "weights.json").write_text(json.dumps(report, indent=1))
        wrong = [worker for worker, found in engines.items() if found["different"]]
        control.end_job(f"failed: {', '.join(wrong)} hold other weights than the trainer" if wrong else "finished")
    control.close()
    parallel.shutdown()


def _look(config: Config, control: ControlClient, publisher: WeightSyncer) -> dict[str, dict[str, Any]]:
    """Of each engine, on every rank: how its weights came in, and how many slices in its memory agree or differ."""
    control.put_json("weights/check_version", TRANSFER_COUNT - 1)
    engines = {}
    for worker in config.worker_names:
        what = f"{worker} to look at its weights"
        found = json.loads(control.wait_for_key(f"weights/check_report/{worker}", config.weights.timeout_seconds, what))
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, publisher.compare_checksums(worker, found["checksums"]))
        same, different = (sum(counts) for counts in zip(*everyone, strict=True))
        engines[worker] = {"load_paths": found["load_paths"], "equal": same, "different": different}
    return engines
