"""Test the weight transfer alone: send the model to all engines a few times, for `webrl check weights`."""

from __future__ import annotations

from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.placement.placement import RankInfo
from megatron_webrl.ring.ring import NodeRing
from megatron_webrl.trainer import parallel
from megatron_webrl.trainer.main import load_model
from megatron_webrl.trainer.parallel import all_gather_object
from megatron_webrl.trainer.weight_sync import WeightSyncer
from megatron_webrl.util import atomic_file, torchvision_shim

TRANSFER_COUNT = 4  # the first transfer includes one-time set-up; the later ones show the speed


def run(config: Config, control: ControlClient, rank: RankInfo, node_ring: NodeRing) -> None:
    """Run one trainer rank of the check. Raises JobFailed naming an engine whose transfer failed."""
    torchvision_shim.install()
    control.start_heartbeat()
    control.report_status("loading the model")
    platform = parallel.initialize(config, rank, control, f"{node_ring.job_id}/weight_sync_check")
    models = [chunk.module for chunk in load_model(config, platform, trainable=False)]
    control.report_status("waiting for the engines")
    weight_syncer = WeightSyncer(models, config, control, platform)
    transfers = []
    for version in range(TRANSFER_COUNT):
        control.report_status(f"transfer {version + 1} of {TRANSFER_COUNT}")
        seconds = weight_syncer.sync(version)
        if weight_syncer.failures:
            worker, reason = next(iter(weight_syncer.failures.items()))
            raise JobFailed(f"{worker} failed transfer {version + 1}: {reason}")
        transfers.append({"seconds": seconds, **weight_syncer.metrics})
    control.report_status("comparing the engines' weights")
    engines = _compare_engines(config, control, weight_syncer)
    if rank.rank == 0:
        report = {"transfers": transfers, "engines": engines, "bytes_by_sender": weight_syncer.bytes_by_sender()}
        atomic_file.write_json(config.run_folder / "weights.json", report, indent=1)
        wrong = [worker for worker, comparison in engines.items() if comparison["different"]]
        control.end_job(f"failed: {', '.join(wrong)} hold other weights than the trainer" if wrong else "finished")
    control.close()
    parallel.shutdown()


def _compare_engines(config: Config, control: ControlClient, weight_syncer: WeightSyncer) -> dict[str, dict[str, Any]]:
    """Per engine, on every rank: its load paths, and how many of its slices equal or differ from the trainer's."""
    control.put_json("weights/check_version", TRANSFER_COUNT - 1)
    engines = {}
    for worker in config.worker_names:
        what = f"{worker} to report checksums of its weights"
        timeout_seconds = config.weights.timeout_seconds
        report = control.wait_for_key(f"weights/check_report/{worker}", timeout_seconds, what)
        counts = all_gather_object(weight_syncer.compare_checksums(worker, report["checksums"]))
        equal, different = (sum(column) for column in zip(*counts, strict=True))
        engines[worker] = {"load_paths": report["load_paths"], "equal": equal, "different": different}
    return engines
