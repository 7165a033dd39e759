"""How many operations of PyTorch a trainer rank launches for a micro-batch, and what the launches cost its host.

Operations are counted on the device "meta", which computes shapes alone: the trainer's own model, learner and optimizer
with the model's real dimensions and tensor-parallel ranks. PyTorch has no fused attention there, so the tower's counts
as several. Layers are alike: counts of few give those of all. What an operation costs the host is measured with a small
model on the CPU, whose kernels take next to nothing; the driver's share of a launch is not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch.optim import adam

from megatron_webrl.config.schema import Config
from megatron_webrl.config.trainer import OptimizerConfig
from megatron_webrl.model import parameter_counts
from megatron_webrl.model import platform as platforms
from megatron_webrl.model.platform import CPU
from megatron_webrl.model.vision_language.packed_input import PackedInput
from megatron_webrl.util import torchvision_shim
from tools.bench.host.groups import GRID
from tools.bench.host.measures import count_operations, cpu_seconds, in_process
from tools.make_tiny_model import make_tiny_model

META = torch.device("meta")
COUNTED_LAYERS = (4, 5)  # of the text model, as features of the tower enter three
TINY = {"layers": 8, "vision_layers": 4, "deepstack": (0, 1, 2)}
ROUNDS = 7
PATCH_VALUES = 3 * 2 * 16**2  # of a patch of two frames


@dataclass(frozen=True)
class Launches:
    """Operations of a rank's host, and CPU seconds of each."""

    score: float  # of a micro-batch, a forward pass
    train: float  # of a micro-batch, both passes
    optimizer: float  # of an optimizer step
    seconds: float  # of each operation: Python, dispatch and autograd


@dataclass(frozen=True)
class BatchSize:
    """A micro-batch of sequences that begin with the same tokens."""

    tokens: int
    sequences: int
    prefix: int  # tokens in common
    scored: int
    images: int


def count_launches(size: str, config: Config, batch: BatchSize) -> Launches:
    """Of a released model's `size`, with the layout and recomputation of `config`, in processes of their own."""
    counts = [in_process(_count, size, layers, config, batch) for layers in COUNTED_LAYERS]
    layers = parameter_counts.make_hf_config(size).text_config.num_hidden_layers - COUNTED_LAYERS[0]
    score, train, optimizer = (fewer + (more - fewer) * layers for fewer, more in zip(*counts, strict=True))
    return Launches(score, train, optimizer, seconds=in_process(_operation_seconds))


def _count(size: str, layers: int, config: Config, batch: BatchSize) -> tuple[int, int, int]:
    """Operations of a forward pass, of a training pass, and of an optimizer step, on the device "meta"."""
    torchvision_shim.install()
    torch.set_num_threads(1)
    platforms.CPU = META  # where the trainer's CPU platform creates all tensors
    platform = platforms.activate("cpu")
    libraries = _complete_meta()
    ranks = config.trainer.tensor_parallel
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=ranks)
    with tempfile.TemporaryDirectory(prefix="webrl-launches-") as folder, _meta_values():
        description = parameter_counts.make_hf_config(size)
        description.text_config.num_hidden_layers = layers
        description.save_pretrained(folder)
        learner = _make_learner(Path(folder), platform, config)
        microbatch = _microbatch(batch, META, GRID, ranks)
        score = count_operations(lambda: learner.score([microbatch]))
        train = count_operations(lambda: _train(learner, microbatch))
        step = count_operations(learner.optimizer.step)
    del libraries
    return score, train, step


def _complete_meta() -> list[torch.library.Library]:
    """Collectives of one process that do nothing, and values of tensors that have none."""
    collectives, values = torch.library.Library("c10d", "IMPL"), torch.library.Library("aten", "IMPL")
    work = torch._C._distributed_c10d.FakeWork

    def same(tensors: Any, *_: Any) -> Any:
        return tensors, work().boxed()

    for name in ("allreduce_", "broadcast_", "_allgather_base_", "_reduce_scatter_base_"):
        collectives.impl(name, same, "Meta")
    for name in ("reduce_scatter_tensor_coalesced_", "allgather_into_tensor_coalesced_"):
        collectives.impl(name, lambda *_: work().boxed(), "Meta")
    values.impl("_local_scalar_dense", lambda x: 1.0 if x.dtype.is_floating_point else 1, "Meta")
    return [collectives, values]


@contextlib.contextmanager
def _meta_values() -> Iterator[None]:
    """Groups of the backend "fake" alone; lists and type names of tensors on "meta"."""
    new_group, tolist, type_ = torch.distributed.new_group, torch.Tensor.tolist, torch.Tensor.type

    def fake_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **kwargs | {"backend": "fake"})

    def listed(self: torch.Tensor) -> Any:
        return torch.ones(self.shape, device=CPU).tolist() if self.is_meta else tolist(self)

    def typed(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = type_(self, *args, **kwargs)
        return found.replace("meta.", "") if isinstance(found, str) else found

    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.Tensor, tolist=listed, type=typed))
        stack.enter_context(mock.patch.object(torch.distributed, "new_group", fake_group))
        # As on CUDA: an operation of Adam is for all parameters.
        stack.enter_context(mock.patch.object(adam, "_default_to_fused_or_foreach", return_value=(False, True)))
        yield


def _make_learner(folder: Path, platform: Any, config: Config) -> Any:
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.build import build_model
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.model.layout import ParallelSizes
    from megatron_webrl.trainer.learner import Learner
    from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp

    process_groups.init_process_groups(ParallelSizes(tensor=config.trainer.tensor_parallel))
    on_meta = platform.device.type == "meta"
    recompute: Any = config.trainer.recompute
    options = ComputeOptions(recompute=recompute, attention="varlen" if on_meta else "auto")
    dtype = torch.bfloat16 if on_meta else torch.float32
    chunks = build_model(folder, dtype=dtype, platform=platform, options=options)
    wrapped = wrap_ddp(chunks)
    optimizer = make_optimizer(wrapped, OptimizerConfig(implementation="torch"), 10, dtype)
    return Learner(wrapped, chunks[0].unpadded_vocab_size, optimizer)


def _train(learner: Any, microbatch: Any) -> None:
    from megatron_webrl.trainer.loss.objective import make_objective

    loss = make_objective(Config().trainer.loss, None, 1, Config().trainer.distillation, Config().trainer.critic)
    learner.forward_backward([microbatch], [microbatch.behaviour_logprobs], loss)


def _microbatch(size: BatchSize, device: torch.device, grid: tuple[int, int, int], image_ranks: int) -> Any:
    """A micro-batch with values where the host reads them."""
    from megatron_webrl.model.vision_language.packed_input import partition_images
    from megatron_webrl.trainer.data.sequence_packer import Microbatch

    def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    with torch.device(CPU):
        own = (size.tokens - size.prefix) // size.sequences
        starts = [0, *(size.prefix + own * number for number in range(size.sequences)), size.tokens]
        grids = torch.tensor([grid] * size.images)
        local = partition_images(grids.tolist(), image_ranks)[0]
        patches, image_tokens = grid[1] * grid[2], grid[1] * grid[2] // 4
        inputs = PackedInput(
            tokens=on_device(size.tokens, dtype=torch.int64),
            position_ids=on_device(3, size.tokens, dtype=torch.int64),
            cu_seqlens=torch.tensor(starts, dtype=torch.int32),
            parents=torch.tensor([-1] + [0] * size.sequences),
            pixels=on_device(patches * len(local), PATCH_VALUES),
            grids=grids,
            scored_positions=on_device(size.scored, dtype=torch.int64),
            image_indices=torch.arange(size.images),
            local_images=torch.tensor(local),
            image_token_positions=torch.arange(size.images * image_tokens),
        )
        lengths = torch.full((size.sequences,), size.scored / size.sequences)
    count = size.scored
    return Microbatch(
        inputs=inputs,
        targets=on_device(count, dtype=torch.int64),
        behaviour_logprobs=on_device(count),
        versions=on_device(count, dtype=torch.int32),
        advantage=on_device(count),
        weight=on_device(count),
        succeeded=on_device(count, dtype=torch.bool),
        step_index=on_device(count, dtype=torch.int64),
        step_lengths=lengths.to(device),
        step_ids=((0, 0, 0),) * size.sequences,
        value_weight=on_device(size.sequences),
        temperature=1.0,
        token_count=size.tokens,
    )


def _operation_seconds() -> float:
    """CPU seconds of an operation of a training pass whose kernels have next to nothing to compute."""
    torchvision_shim.install()
    torch.set_num_threads(1)
    platform = platforms.activate("cpu")
    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="webrl-launches-") as folder:
        path = make_tiny_model(Path(folder) / "model", **TINY)  # type: ignore[arg-type]
        config = Config()
        config.trainer = dataclasses.replace(config.trainer, tensor_parallel=1, recompute="full")
        learner = _make_learner(path, platform, config)
        microbatch = _microbatch(BatchSize(8, 2, 4, 4, 1), CPU, (1, 2, 2), 1)
        operations = count_operations(lambda: _train(learner, microbatch))
        return cpu_seconds(lambda: _train(learner, microbatch), ROUNDS) / operations
