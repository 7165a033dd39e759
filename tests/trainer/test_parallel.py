"""The trainer's process groups: a store for each attempt, and one timeout for all groups."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import JobFailed
from megatron_webrl.placement.placement import RankInfo
from tests import gloo, job_control

POISON = "exception_dump"  # the key that ends every process of the groups on a store


def run(rank: int, address: Path, folder: str) -> None:
    """Two attempts of one job that leave the key of a failed NCCL group, and one whose first rank does not start."""
    from megatron.core import parallel_state

    from megatron_webrl.trainer import parallel

    config = Config()
    config.model.platform = "cpu"
    config.trainer.data_parallel = 2
    control = job_control.connect(address, f"trainer-{rank}")
    keys: list[list[str]] = []
    for attempt in range(2):
        parallel.initialize(config, RankInfo(rank, 2, rank), control, f"job/{attempt}")
        store = torch.distributed.distributed_c10d._get_default_store()
        keys.append(store.underlying_store.list_keys())
        torch.distributed.barrier()  # both have looked
        if rank == 0:
            for each in (store, store.underlying_store, torch.distributed.PrefixStore("0", store)):
                each.set(POISON, "1")
        torch.distributed.barrier()
        assert store.underlying_store.check([POISON]), "the ranks of an attempt share one store"
        groups = (torch.distributed.group.WORLD, parallel_state.get_data_parallel_group())
        limits = [group._get_backend(torch.device("cpu")).options._timeout for group in groups]
        assert limits == [timedelta(seconds=parallel.collective_timeout_seconds(config))] * 2
        torch.distributed.barrier()
        del store
        parallel.shutdown()
    config.run.startup_timeout_seconds = 0.2
    with pytest.raises(JobFailed, match=rf"trainer-{rank} waited 0 s for the store of trainer-0"):
        parallel._attempt_store(config, RankInfo(1, 2, 1), control, "job/2")
    torch.save((keys, sorted(job_control.facts(address))), Path(folder) / f"keys-{rank}.pt")


def test_each_attempt_of_the_trainer_has_a_store_of_its_own(tmp_path: Path) -> None:
    with job_control.control_service(tmp_path) as address:
        gloo.spawn(run, address, str(tmp_path), seconds=120)
        for rank in range(2):
            attempts, of_job = torch.load(tmp_path / f"keys-{rank}.pt")
            assert not [key for key in (*attempts[1], *of_job) if POISON in key]
            trainer = {key for key in of_job if key.startswith("trainer/")}
            assert trainer == {"trainer/job/0/store", "trainer/job/1/store"}
