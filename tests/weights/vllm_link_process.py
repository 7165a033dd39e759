"""Links between a trainer of two tensor-parallel ranks, in threads, and a real vLLM engine in its own processes.

Runs all scenarios of test_vllm_worker.py and writes a report.
Usage: python -m tests.weights.vllm_link_process <model folder> <tensor-parallel size> <report>
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import Connection, ControlAddress
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.parameter_map import parameter_shapes, to_megatron
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.link import LinkFacts
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from megatron_webrl.weights.slices import box_index
from tests import job_control
from tests.weights.vllm_process import SAMPLING, Scoring

SENDERS = 2
STAGING = 2**20
SECONDS = 20.0
Source = Callable[[str], torch.Tensor]


class Sender:
    """All ranks of a trainer with the weights of a transformers model."""

    def __init__(self, reference: Any, engine_ranks: int, folder: Path) -> None:
        """`folder`: of the control service."""
        self.reference, self.ranks = reference, engine_ranks
        self.trainer = TrainerTopology(ParallelSizes(tensor=SENDERS), SENDERS, ("here",) * SENDERS)
        sizes = EngineSizes(engine_ranks)
        self.engines = EngineTopology.uniform(sizes, (("here",) * engine_ranks,))
        self.control, _ = job_control.start(folder)
        self.plan = self.plan_of(reference.config)
        self.pool = ThreadPoolExecutor(SENDERS)
        self.links: list[transport.TransferLink] = []

    def plan_of(self, hf_config: Any) -> TransferPlan:
        return TransferPlan(hf_config, self.trainer, self.engines, 4, STAGING)

    def info(self, name: str, plan: TransferPlan | None = None) -> dict[str, Any]:
        """LinkInfo fields of link `name`."""
        return {
            **(plan or self.plan).to_json(),
            "control": str(self.control),
            "name": name,
            "engine": 0,
            "dtype": "float32",
            "backend": "gloo",
            "timeout_seconds": SECONDS,
            "join_timeout_seconds": SECONDS,
        }

    def join(self, name: str) -> None:
        def one(rank: int) -> transport.TransferLink:
            facts = Connection(self.control, f"trainer-{rank}", SECONDS)
            return transport.join_link(facts, name, rank, SENDERS + self.ranks, SECONDS, "gloo", senders=(0, 1))

        assert self.plan.senders(0) == tuple(range(SENDERS))
        self.links = list(self.pool.map(one, range(SENDERS)))

    def parameters(self, rank: int) -> dict[str, torch.Tensor]:
        """Megatron's parameters of a rank; experts are complete on each."""
        state, mappings = self.reference.state_dict(), parameter_mappings(self.reference.config, "transposed")
        shapes = parameter_shapes(mappings, SENDERS, 1)
        found = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for mapping in mappings:
            place = (rank, SENDERS) if mapping.expert is None else (0, 1)
            to_megatron(mapping, state[mapping.hf_param], found[mapping.megatron_param], *place)
        return found

    def send(self, transfer: int, verify: bool, broken: str = "") -> list[str | None]:
        """Send one transfer; reading `broken` fails on the last rank. Returns each rank's error."""

        def one(rank: int) -> str | None:
            parameters = self.parameters(rank)
            if rank == SENDERS - 1:
                parameters.pop(broken, None)
            link = self.links[rank]
            outgoing = link, self.plan.messages(0, sender=rank)
            try:
                return transport.send(
                    [outgoing], parameters.__getitem__, torch.float32, STAGING, transfer, SECONDS, verify=verify
                )[link.name]
            except KeyError as error:
                return f"no parameter {error}"

        return list(self.pool.map(one, range(SENDERS)))

    def sums(self, receiver: int) -> list[int]:
        """Checksums of the receiver's slices in the order of its messages, from the trainer's parameters."""
        parameters = [self.parameters(rank) for rank in range(SENDERS)]
        return [
            transport.checksum(
                parameters[message.sender][piece.source_param][box_index(piece.source_offset, piece.size)]
            )
            for message in self.plan.messages(0, receiver=receiver)
            for piece in message.slices
        ]


def partially_updated(worker: Any) -> bool:
    """Whether a worker's model holds weights of two versions."""
    return bool(worker.weight_transfer_engine.target.partially_updated)


def collects_garbage(worker: Any) -> bool:
    """Whether a worker's process collects garbage, which it does not while it imports."""
    return gc.isenabled() and gc.get_freeze_count() > 0


class LinkHarness:
    """An engine, a trainer and their model."""

    def __init__(self, llm: Any, folder: Path, ranks: int) -> None:
        self.llm, self.scoring, self.transfers, self.scored = llm, Scoring(folder), 0, 0
        self.sender = Sender(self.scoring.reference, ranks, folder)

    async def call(self, method: str | Callable[..., Any], *arguments: Any) -> list[Any]:
        return await asyncio.wait_for(self.llm.collective_rpc(method, args=arguments), 4 * SECONDS)

    async def run_phase(self, phase: str, info: dict[str, Any] | None = None) -> list[str | None]:
        return await self.call("webrl_weight_update", phase, info)

    async def join(self, name: str) -> list[str | None]:
        _, errors = await asyncio.gather(
            asyncio.to_thread(self.sender.join, name), self.run_phase("init", self.sender.info(name))
        )
        return errors

    async def update(self, broken: str = "", verify: bool = False) -> tuple[list[str | None], list[str | None]]:
        """Send the weights; returns the errors of trainer ranks and engine ranks."""
        self.transfers += 1
        info = {"transfer": self.transfers, "version": self.transfers, "verify": verify}
        assert await self.run_phase("start") == [None] * self.sender.ranks
        sent, received = await asyncio.gather(
            asyncio.to_thread(self.sender.send, self.transfers, verify, broken), self.run_phase("update", info)
        )
        if any(received):
            return sent, received
        return sent, await self.run_phase("finish")

    async def difference(self) -> float:
        await self.llm.reset_prefix_cache()
        await self.llm.reset_encoder_cache()
        return max([await self._difference(True), await self._difference(False)])

    async def _difference(self, with_image: bool) -> float:
        request, images = self.scoring.request(with_image)
        self.scored += 1
        async for output in self.llm.generate(request, SAMPLING, f"score-{self.scored}"):
            if output.finished:
                return self.scoring.difference(output, images)
        raise AssertionError("no output")


async def refusals(harness: LinkHarness) -> dict[str, Any]:
    """Errors for another model, another engine layout, an absent service, missing fields and a missing link."""
    other = copy.deepcopy(harness.scoring.reference.config)
    other.vision_config.intermediate_size *= 2
    sender = harness.sender
    found: dict[str, Any] = {"model": await harness.run_phase("init", sender.info("other", sender.plan_of(other)))}
    found["stored_reason"] = LinkFacts(Connection(sender.control, "trainer-0", SECONDS), "other").get("refused")
    layout = sender.info("layout")
    layout["engines"]["sizes"][0]["pipeline"] = 2
    found["layout"] = await harness.run_phase("init", layout)
    found["backend"] = await harness.run_phase("init", sender.info("backend") | {"backend": "nccl"})
    address = ControlAddress.read(sender.control)
    assert address is not None
    replace(address, port=1).write(silent := sender.control.with_name("silent.json"))
    for name, file in (("silent", silent), ("missing", sender.control.with_name("missing.json"))):
        info = sender.info("nowhere") | {"control": str(file), "join_timeout_seconds": 1.0}
        found[name] = await harness.run_phase("init", info)
    found["field"] = await harness.run_phase("init", {"control": str(sender.control)})
    found["start"] = await harness.run_phase("start")
    return found


async def faults(harness: LinkHarness) -> dict[str, Any]:
    """A trainer rank fails in a transfer; the engine is partially updated until a transfer over another link."""
    harness.scoring.perturb()
    sent, received = await harness.update(broken="decoder.layers.1.self_attention.linear_qkv.weight")
    found: dict[str, Any] = {
        "sent": sent,
        "received": received,
        "partially_updated": await harness.call(partially_updated),
    }
    found["start"] = await harness.run_phase("start")
    found["halfway"] = await harness.difference()
    found["joined"] = await harness.join("second")
    found["update"] = await harness.update()
    found["healed"], found["partially_updated_after"] = (
        await harness.difference(),
        await harness.call(partially_updated),
    )
    # A started update without data, as on a rank whose neighbour failed; then a complete one.
    harness.scoring.perturb()
    assert await harness.run_phase("start") == [None] * harness.sender.ranks
    found["again"] = await harness.update()
    found["again_difference"] = await harness.difference()
    return found


async def run(folder: Path, ranks: int, result: Path) -> None:
    config = Config()
    config.model.path, config.model.platform, config.rollout.tensor_parallel = str(folder), "cpu", ranks
    config.rollout.max_model_len, config.rollout.kv_cache_mib = 1024, 64
    starting = ThreadPoolExecutor(1)
    llm = await asyncio.get_running_loop().run_in_executor(starting, vllm_environment.start_engine, config, 0)
    harness = LinkHarness(llm, folder, ranks)
    report: dict[str, Any] = {"refusals": await refusals(harness), "joined": await harness.join("first"), "rounds": []}
    for number in range(2):
        harness.scoring.perturb()
        stale = await harness.difference()
        errors = await harness.update(verify=number == 1)
        report["rounds"].append((errors, stale, await harness.difference()))
    live = await harness.call("webrl_live_checksums")
    report["sums"] = [(mine, harness.sender.sums(rank)) for rank, mine in enumerate(live)]
    report["collects_garbage"] = await harness.call(collects_garbage)
    report["load_paths"] = await harness.call("webrl_load_paths")
    report["faults"] = await faults(harness)
    llm.output_handler.cancel()  # otherwise it reports the end of the engine core as an error
    await asyncio.get_running_loop().run_in_executor(starting, llm.shutdown, 20.0)
    starting.shutdown()
    result.write_text(json.dumps(report))


def main() -> None:
    torch.set_num_threads(1)
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])))


if __name__ == "__main__":
    main()
