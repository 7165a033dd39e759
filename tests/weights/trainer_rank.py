"""One rank of a real trainer that only sends weights: one version after the other, each from its own folder.

Version 0 is the configuration's model, version n the n-th folder's weights, sent when `go/<n>` is among the facts; the
first rank sets `sent/<n>` to the result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from megatron_webrl.config.load import parse_config
from megatron_webrl.control.child_process import die_with_parent
from megatron_webrl.control.client import ControlClient
from megatron_webrl.placement.placement import RankInfo


def run(rank: RankInfo, config_file: Path, address: Path, folders: Sequence[Path], logs: Path) -> None:
    """Send the weights of `folders`. Output goes to `logs`/trainer-RANK.log."""
    die_with_parent()
    with (logs / f"trainer-{rank.rank}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Imported already in the server that forks this process, and not to be imported beside vLLM.
    from megatron_webrl.model.build import load_hf
    from megatron_webrl.trainer import parallel
    from megatron_webrl.trainer.main import load_model, make_learner
    from megatron_webrl.trainer.weight_sync import WeightSyncer

    config = parse_config(config_file)
    control = ControlClient(address, f"trainer-{rank.rank}")
    control.start_heartbeat()
    platform = parallel.initialize(config, rank, control, f"test/{control.register_instance()}")
    learner = make_learner(config, load_model(config, platform))
    weight_syncer = WeightSyncer(learner.models, config, control, platform)
    for version in range(len(folders) + 1):
        if version:
            control.wait_for_key(f"go/{version}", 120, f"the request for version {version}")
            load_hf(learner.models, folders[version - 1])
        weight_syncer.sync(version)
        if rank.rank == 0:
            control.put_json(f"sent/{version}", {"lost": weight_syncer.failed_transfers})
    parallel.shutdown()
