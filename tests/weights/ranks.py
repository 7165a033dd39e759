"""Transfer ranks as processes, and a small model whose slices are computed independently of the plan."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.control.connection import Connection
from megatron_webrl.weights import transport
from megatron_webrl.weights.link import LinkFacts, poll_until
from megatron_webrl.weights.slices import Slice, TransferMessage

SENDERS = 2


@dataclass(frozen=True)
class Part:
    """A tensor, or a stack of tensors, and the dimensions along which trainer and engine ranks shard it."""

    shape: tuple[int, ...]
    trainer: int | None
    engine: int | None
    stacked: int = 0  # number of stacked tensors in one parameter


MODEL = {
    "column": Part((24, 10), 0, 0),
    "turned": Part((8, 30), 1, 0),
    "row": Part((12, 16), 1, 1),
    "experts": Part((8, 6), 0, 1, stacked=3),
    "norm": Part((7,), None, None),
    "bias": Part((4,), None, 0),
    "scale": Part((), None, None),
    "large": Part((400, 32), 0, 0),
}


def full(name: str, part: Part, number: int) -> torch.Tensor:
    """The whole tensor in transfer `number`: random values that are exact in bfloat16."""
    generator = torch.Generator().manual_seed(1000 * number + sum(name.encode()))
    shape = (part.stacked, *part.shape) if part.stacked else part.shape
    return torch.randn(shape, generator=generator).bfloat16().float()


def shard_of(whole: torch.Tensor, part: Part, dim: int | None, rank: int, ranks: int) -> torch.Tensor:
    if dim is None or ranks == 1:
        return whole.clone()
    return whole.chunk(ranks, dim + bool(part.stacked))[rank].clone()


def _range(shape: tuple[int, ...], dim: int | None, rank: int, ranks: int) -> list[tuple[int, int]]:
    ranges = [(0, size) for size in shape]
    if dim is not None:
        step = shape[dim] // ranks
        ranges[dim] = (rank * step, (rank + 1) * step)
    return ranges


def slices(model: dict[str, Part], sender: int, receiver: int, receivers: int, elements: int) -> Iterator[Slice]:
    """Slices of up to `elements` from a trainer rank to an engine rank; one rank sends each replicated tensor."""
    for place, (name, part) in enumerate(model.items()):
        if part.trainer is None and (place + receiver) % SENDERS != sender:
            continue
        held = _range(part.shape, part.trainer, sender, SENDERS)
        wanted = _range(part.shape, part.engine, receiver, receivers)
        box = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(held, wanted, strict=True)]
        if any(start >= stop for start, stop in box):
            continue
        rows = max(1, elements // math.prod(stop - start for start, stop in box[1:]))
        for row in range(*box[0], rows) if box else (0,):
            piece = [(row, min(row + rows, box[0][1])), *box[1:]] if box else []
            size = tuple(stop - start for start, stop in piece)
            source = tuple(start - a for (start, _), (a, _) in zip(piece, held, strict=True))
            target = tuple(start - c for (start, _), (c, _) in zip(piece, wanted, strict=True))
            for stack in [(number,) for number in range(part.stacked)] or [()]:
                yield Slice(f"{name}.hf", size, name, (*stack, *source), name, (*stack, *target))


def messages(model: dict[str, Part], receivers: int, elements: int) -> list[TransferMessage]:
    """All messages to an engine in link order: the k-th of every pair before any (k+1)-th."""
    pairs = []
    for sender, receiver in itertools.product(range(SENDERS), range(receivers)):
        queue: list[list[Slice]] = [[]]
        for piece in slices(model, sender, receiver, receivers, elements):
            if queue[-1] and sum(other.elements for other in queue[-1]) + piece.elements > elements:
                queue.append([])
            queue[-1].append(piece)
        pairs.append([TransferMessage(sender, receiver, tuple(m), sum(s.elements for s in m)) for m in queue if m])
    return [message for rank in itertools.zip_longest(*pairs) for message in rank if message is not None]


@dataclass(frozen=True)
class Case:
    """Parameters of a test that all its ranks share."""

    control: Path  # file with the address of the control service
    backend: Any  # of the link
    receivers: tuple[int, ...]  # ranks of each engine
    model: dict[str, Part]
    elements: int = 200  # limit of a message
    wire: str = "bfloat16"
    trainer: str = "float32"
    engine: str = "float32"
    device: str = "cpu"  # of the parameters on both sides
    staging: int = 2**16
    seconds: float = 20.0
    numbers: tuple[int, ...] = (1,)  # consecutive transfers
    verify: bool = True


@dataclass(frozen=True)
class Fault:
    """A fault of one rank: a signal to itself or an error, after `after` tensors were requested or written."""

    after: int = -1
    signal: int = 0
    error: str = ""
    flip: str = ""  # parameter whose last value changes when all is written
    watch: str = ""

    def strike(self, count: int) -> None:
        if count == self.after and self.signal:
            os.kill(os.getpid(), self.signal)
        if count == self.after and self.error:
            raise LookupError(self.error)


class Parameters:
    """A WeightTarget of plain tensors."""

    def __init__(self, case: Case, rank: int, ranks: int, fault: Fault) -> None:
        self.tensors = {
            name: torch.full_like(shard_of(full(name, part, 0), part, part.engine, rank, ranks), float("nan")).to(
                case.device, getattr(torch, case.engine)
            )
            for name, part in case.model.items()
        }
        self.left = dict.fromkeys(self.tensors, 0)
        self.writes = 0
        self.fault = fault

    def tensor(self, parameter: str) -> torch.Tensor:
        tensor = self.tensors[parameter]
        if parameter == self.fault.flip and not tensor.isnan().any():
            tensor.view(-1)[-1] += 1
        return tensor

    def mark_written(self, parameter: str, elements: int) -> None:
        self.fault.strike(self.writes)
        self.left[parameter] += elements
        self.writes += 1


def _join(case: Case, engine: int, rank: int) -> transport.TransferLink:
    """Join a link, and wait until all its ranks have: no fault is to strike before."""
    control, name = Connection(case.control, f"rank-{rank}", 30), f"engine-{engine}"
    size, facts = SENDERS + case.receivers[engine], LinkFacts(control, name)
    link = transport.join_link(control, name, rank, size, case.seconds, case.backend, torch.device(case.device), (0, 1))
    facts.set(f"joined/{rank}", "")
    assert poll_until(lambda: facts.check([f"joined/{other}" for other in range(size)]), case.seconds)
    return link


def staging_bytes(link: transport.TransferLink) -> int:
    return sum(buffer.nbytes for buffer in link.staging_buffers.values())


def trainer_rank(answer: Pipe, case: Case, rank: int, fault: Fault) -> None:
    """Send every transfer to all engines; answer with (results of each, seconds, bytes of staging, peak growth)."""
    torch.set_num_threads(1)
    try:
        outgoing = []
        for engine, receivers in enumerate(case.receivers):
            mine = [m for m in messages(case.model, receivers, case.elements) if m.sender == rank]
            outgoing.append((_join(case, engine, rank), mine))
        results, asked = [], itertools.count()
        began = time.monotonic()
        growth = 0
        for number in case.numbers:
            parameters = {
                name: shard_of(full(name, part, number), part, part.trainer, rank, SENDERS).to(
                    case.device, getattr(torch, case.trainer)
                )
                for name, part in case.model.items()
            }

            def source(name: str, parameters: dict[str, torch.Tensor] = parameters) -> torch.Tensor:
                fault.strike(next(asked))
                return parameters[name]

            before = reset_peak()
            watch = (lambda name: fault.watch if name == "engine-0" else None) if fault.watch else None
            wire = getattr(torch, case.wire)
            results.append(
                transport.send(outgoing, source, wire, case.staging, number, case.seconds, watch, verify=case.verify)
            )
            growth = max(growth, peak() - before)
        answer.send((results, time.monotonic() - began, sum(staging_bytes(link) for link, _ in outgoing), growth))
        for link, _ in outgoing:
            link.close()
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def engine_rank(answer: Pipe, case: Case, engine: int, rank: int, fault: Fault) -> None:
    """Receive every transfer; answer with (names of wrong tensors, seconds, bytes of staging, peak growth)."""
    torch.set_num_threads(1)
    ranks = case.receivers[engine]
    try:
        link = _join(case, engine, SENDERS + rank)
        mine = [m for m in messages(case.model, ranks, case.elements) if m.receiver == rank]
        wrong, growth = [], 0
        began = time.monotonic()
        for number in case.numbers:
            target = Parameters(case, rank, ranks, fault)
            before = reset_peak()
            wire = getattr(torch, case.wire)
            transport.receive(link, mine, target, wire, case.staging, number, case.seconds, verify=case.verify)
            growth = max(growth, peak() - before)
            for name, part in case.model.items():
                whole = shard_of(full(name, part, number), part, part.engine, rank, ranks)
                if not torch.equal(target.tensors[name].float().cpu(), whole) or target.left[name] != whole.numel():
                    wrong.append(f"{number}: {name}")
        answer.send((wrong, time.monotonic() - began, staging_bytes(link), growth))
        link.close()
    except Exception as error:
        answer.send(f"{type(error).__name__}: {error}")


def reset_peak() -> int:
    """Reset this process's peak memory; returns its current memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise LookupError(key)
