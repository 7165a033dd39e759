"""Engines that announce themselves, and engines that fail their weight transfers: when the job ends."""

from __future__ import annotations

import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import Connection, JobFailed
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.platform import Platform
from megatron_webrl.trainer.weight_sync import MAX_FAILURES, WeightSyncer
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes, engine_parameter_shapes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from tests.job_control import connect, control_service
from tests.model import tiny
from tests.waiting import until
from tests.weights import layouts, nccl_order


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
        worker.put_json("engine/rollout-0", announcement | {"trainer": announcement["trainer"] - 1})  # an earlier one
        assert (syncer.has_new_engines(), syncer.has_engines()) == (False, False)
        worker.put_json("engine/rollout-0", announcement)
        worker.register_instance()  # the worker has started again, and its engine is not there yet
        assert (syncer.has_new_engines(), syncer.has_engines()) == (False, False)


class Engine(dict[str, torch.Tensor]):
    """A worker with an engine of one rank: its parameters, and a link over which it takes offered weights."""

    def __init__(self, address: Path, number: int, config: Config, hf_config: Any) -> None:
        shapes = engine_parameter_shapes(hf_config, EngineSizes(), 0)
        super().__init__({name: torch.full(shape, float(layouts.PADDING)) for name, shape in shapes.items()})
        self.control, self.config, self.number = connect(address, f"rollout-{number}"), config, number
        self.plan = TransferPlan(hf_config, TRAINER, ENGINES, 4, config.weights.bucket_mib * 2**20)
        self.instance, self.links, self.link = self.control.register_instance(), 0, cast(Any, None)

    @property
    def link_id(self) -> str:
        return f"rollout-{self.number}.{self.instance}.{self.links}"

    def announce(self) -> None:
        self.links, self.link = self.links + 1, None
        names = {"link_id": self.link_id, "instance_id": f"rollout-{self.number}.{self.instance}"}
        names |= {"trainer": self.control.get_json("weights/trainer"), "nodes": ["there"]}
        self.control.put_json(f"engine/rollout-{self.number}", names | {"sizes": asdict(EngineSizes())})

    def take(self, version: int, fails: bool = False) -> None:
        """Take the weights of a version that is offered, or report that the engine cannot."""
        name, facts = f"rollout-{self.number}", Connection(self.control.address_file, f"engine-{self.number}", 30)
        if self.link is None:
            backend: Any = "nccl" if self.config.weights.transport == "nccl" else "host"
            self.link = transport.join_link(facts, f"weights/{self.link_id}", 1, 2, 20.0, backend)
        until(lambda: (self.offer() or {}).get("version") == version, "the offer", 20)
        if fails:
            self.control.put_json(f"weights/failed/{name}", {"link_id": self.link_id, "reason": "no memory"})
            return
        messages, weights = self.plan.messages(self.number), self.config.weights
        number = self.offer()["transfer"]
        transport.receive(
            self.link, messages, self, torch.float32, weights.bucket_mib * 2**20, number, 20.0, weights.verify
        )
        applied = {"link_id": self.link_id, "version": version, "pause_seconds": 0.1, "cuda_graphs": False}
        applied |= {"parameters": {"in_place": len(self), "reload": 0}, "async_scheduling": False}
        self.control.put_json(f"weights/applied/{name}", applied)

    def offer(self) -> Any:
        offer: Any = self.control.get_json("weights/offer")
        return offer if offer and offer["links"].get(f"rollout-{self.number}") == self.link_id else None

    def tensor(self, parameter: str) -> torch.Tensor:
        return self[parameter]

    def mark_written(self, parameter: str, elements: int) -> None: ...


TRAINER = TrainerTopology(ParallelSizes(), 1, (socket.gethostname(),))
ENGINES = EngineTopology.uniform(EngineSizes(), (("there",), ("there",)))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("transport_setting", ["host", "nccl"])
def test_an_engine_whose_transfer_failed_gets_weights_over_another_link_and_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport_setting: Any
) -> None:
    config, hf_config = Config(), tiny.configuration(tiny.Shape())
    config.model.dtype, config.rollout.engines, config.weights.transport = "float32", 2, transport_setting
    if transport_setting == "nccl":
        monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "20")
        nccl_order.install(monkeypatch, nccl_order.Network())
    state = layouts.numbered_state(hf_config)
    case = layouts.Case(hf_config, TRAINER, ENGINES, 0)
    parameters = {name: each.float() for name, each in layouts.trainer_parameters(case, state, 0).items()}
    groups = SimpleNamespace(**dict.fromkeys(("tp", "pp", "ep", "expt_tp", "cp")))
    chunk: Any = SimpleNamespace(canonical_parameters=lambda: parameters, hf_config=hf_config, pg_collection=groups)
    wanted = layouts.engine_parameters(hf_config, EngineSizes(), state, 0)
    with control_service(tmp_path) as address, ThreadPoolExecutor(2) as pool:
        control = connect(address, "trainer-0")
        name = "cuda" if transport_setting == "nccl" else "cpu"  # whose device is the CPU here
        syncer = WeightSyncer([chunk], config, control, Platform(name, torch.device("cpu"), "gloo"))
        engines = [Engine(address, number, config, hf_config) for number in range(2)]
        for each in engines:
            each.announce()

        def sync(version: int, *takers: int, fails: tuple[int, ...] = (), **options: bool) -> set[str]:
            """Send a version, which these engines take; returns the workers that failed."""
            taking = [pool.submit(engines[number].take, version, number in fails) for number in (*takers, *fails)]
            syncer.sync(version, **options)
            for each in taking:
                each.result(20)
            assert set(cast(Any, control.get_json("weights/offer"))["links"]) == {
                f"rollout-{number}" for number in (*takers, *fails)
            }
            return set(syncer.failures)

        assert sync(0, 1, fails=(0,)) == {"rollout-0"}
        assert "no memory" in syncer.failures["rollout-0"]
        assert sync(1, 1) == set()
        assert not syncer.has_new_engines()
        engines[0].announce()
        assert syncer.has_new_engines()
        assert sync(1, 0, new_engines_only=True) == set()
        for tensor in parameters.values():
            tensor += 1
        assert sync(2, 0, 1) == set()
        assert (syncer.version, syncer.failed_transfers) == (2, 1)
        for each in engines:
            for name, tensor in wanted.items():
                assert torch.equal(each[name], tensor + (tensor != layouts.PADDING)), name
            each.link.close()


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
