"""A trial of the weight path alone: the model goes to all engines a few times, for `webrl doctor --weights`."""

from __future__ import annotations

import json
from typing import Any

import torch

from megatron_webrl import compat
from megatron_webrl.config import Config
from megatron_webrl.control import Control, JobFailed
from megatron_webrl.ring.node_ring import NodeRing
from megatron_webrl.trainer import parallel
from megatron_webrl.trainer.build import make_learner
from megatron_webrl.trainer.parallel import Rank
from megatron_webrl.trainer.publish import Publisher

TRANSFERS = 4
"""The first one includes what is done once; the last ones show the speed."""


def run(config: Config, control: Control, rank: Rank, place: NodeRing) -> None:
    """Run one trainer rank of the trial. Raises JobFailed naming an engine that did not take its weights."""
    compat.install()
    control.start_heartbeat()
    control.report("loading the model")
    platform = parallel.initialize(config, rank, control.store, f"{place.run_id}/trial")
    learner = make_learner(config, platform)
    control.report("waiting for the engines")
    publisher = Publisher(learner.models, config, control, platform)
    transfers = []
    for version in range(TRANSFERS):
        control.report(f"transfer {version + 1} of {TRANSFERS}")
        seconds = publisher.publish(version)
        if publisher.failures:
            worker, reason = next(iter(publisher.failures.items()))
            raise JobFailed(f"{worker} did not take transfer {version + 1}: {reason}")
        transfers.append({"seconds": seconds, **publisher.take_figures()})
    control.report("looking at the engines' memory")
    engines = _look(config, control, publisher)
    if rank.rank == 0:
        report = {"transfers": transfers, "engines": engines, "senders": publisher.load()}
        (config.run_folder / "weights.json").write_text(json.dumps(report, indent=1))
        wrong = [worker for worker, found in engines.items() if found["different"]]
        control.finish(f"failed: {', '.join(wrong)} hold other weights than the trainer" if wrong else "finished")
    control.close()
    parallel.shutdown()


def _look(config: Config, control: Control, publisher: Publisher) -> dict[str, dict[str, Any]]:
    """Of each engine, on every rank: how its weights came in, and how many slices in its memory agree or differ."""
    control.put("weights/asked", TRANSFERS - 1)
    engines = {}
    for worker in config.workers:
        what = f"{worker} to look at its weights"
        found = json.loads(control.wait_key(f"weights/found/{worker}", config.weights.seconds, what))
        everyone: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everyone, publisher.compare(worker, found["sums"]))
        same, different = (sum(counts) for counts in zip(*everyone, strict=True))
        engines[worker] = {"ways": found["ways"], "same": same, "different": different}
    return engines
