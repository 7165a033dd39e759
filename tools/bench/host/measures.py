"""CPU seconds and operations of a call, and the shape of a packed micro-batch."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from megatron_webrl.control import child_process
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.placement.model_shape import MicrobatchShape

REPEATS = 3


def packed_shape(packed: PackedInput) -> MicrobatchShape:
    """The shape of a micro-batch whose sequences may branch: a segment's tokens attend to those of its ancestors."""
    assert packed.parents is not None
    starts, parents = packed.cu_seqlens.tolist(), packed.parents.tolist()
    lengths = [stop - start for start, stop in pairwise(starts)]
    before: list[int] = []  # tokens of the ancestors of each segment; parents come first
    for parent in parents:
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
    alone = MicrobatchShape.of_sequences(lengths, len(packed.scored_positions), packed.grids.tolist())
    pairs = sum(length * earlier for length, earlier in zip(lengths, before, strict=True))
    return dataclasses.replace(alone, pairs=alone.pairs + pairs)


def cpu_seconds(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Median CPU seconds of `repeats` calls, after one that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return statistics.median(taken)


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """Result of `work` in a process of its own, which dies with this one."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, child_process.die_with_parent, (signal.SIGKILL, os.getpid())) as pool:
        return pool.submit(work, *arguments).result()


class _Counter(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        return func(*args, **(kwargs or {}))


def count_operations(work: Callable[[], Any]) -> int:
    """Number of PyTorch's operations, those of backward passes and views with them."""
    with _Counter() as counter:
        work()
    return counter.operations
