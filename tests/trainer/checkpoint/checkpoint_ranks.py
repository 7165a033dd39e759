"""What the two gloo processes of the checkpoint tests do.

A mixture-of-experts GPT of Megatron's own stands for the model where layouts matter: with a dense and an expert
optimiser, pipeline stages and virtual ones. Its gradient is a function of the weights, so it does not depend on the
layout.
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_webrl.config.trainer import CheckpointConfig, OptimizerConfig
from megatron_webrl.model import platform as platforms
from megatron_webrl.system import torchvision_shim


@dataclass(frozen=True)
class Layout:
    """How two processes are laid out; what is left over are replicas."""

    name: str
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # chunks of one pipeline stage
    expert: int = 1


LAYOUTS = (
    Layout("replicas"),
    Layout("tensor", tensor=2),
    Layout("pipeline", pipeline=2),
    Layout("virtual", pipeline=2, virtual=2),
    Layout("expert", expert=2),
)
EXPERTS, LAYERS = 2, 4
WRITE_SECONDS = 100.0  # a write that takes longer fails by name, long before the test does


@contextlib.contextmanager
def session(rank: int, folder: str) -> Iterator[Any]:
    """Both processes in one group; gives the platform."""
    torchvision_shim.install()
    torch.set_num_threads(1)
    platform = platforms.activate("cpu")
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    yield platform
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """Megatron's process groups for a layout."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()


def make_learner(
    layout: Layout, dtype: torch.dtype = torch.float32, optimizer: OptimizerConfig | None = None, steps: int = 10
) -> Any:
    """A small mixture of experts in this layout; its weights depend on their names only."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    from megatron_webrl.trainer.distributed import wrap_ddp
    from megatron_webrl.trainer.learner import Learner
    from megatron_webrl.trainer.optimizer import make_optimizer

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=16,
        ffn_hidden_size=24,
        moe_ffn_hidden_size=24,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        add_bias_linear=False,
        normalization="RMSNorm",
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    models = []
    for number in range(layout.virtual):
        stage = {"ignore_virtual": False, "vp_stage": number if layout.virtual > 1 else None}
        model = GPTModel(
            config,
            get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage["vp_stage"]),
            vocab_size=32,
            max_sequence_length=16,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=stage["vp_stage"],
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        models.append(model)
    chunks = wrap_ddp(models)
    settings = optimizer or OptimizerConfig(learning_rate=1e-3, clip_norm=1e9)
    return Learner(chunks, 32, make_optimizer(chunks, settings, steps, dtype))


def step(learner: Any) -> None:
    """One step of the optimiser. The gradient is made of the weights."""
    for chunk in learner.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(0.1 * torch.sin(37 * parameter.detach().float()) + 0.01)
    learner.optimizer.step()


def scramble(learner: Any) -> None:
    """Give every element a weight of its own: a function of its place in the whole tensor, whatever the layout."""
    from megatron_webrl.trainer.checkpoint.checkpoint_state import _tensors, sharded_weights

    with torch.no_grad():
        for tensor in _tensors(sharded_weights(learner.chunks)):
            place = sum(
                (torch.arange(size) + offset).reshape([-1] + [1] * (tensor.data.dim() - axis - 1)) * 7 ** (axis + 1)
                for axis, (size, offset) in enumerate(
                    zip(tensor.data.shape, tensor.global_offset[-tensor.data.dim() :], strict=True)
                )
            )
            tensor.data.copy_(torch.sin(place.float() + len(tensor.key)) * 0.5 + 1)
    learner.optimizer.optimizer.reload_model_params()


def state_of(version: int) -> Any:
    from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState

    return TrainerState(version, 0, 4, (5,), {"trained": 8}, 1, updates=[{"version": version}])


def checkpoints_in(folder: Path, **settings: Any) -> Any:
    """Checkpoints of this process; the model's description is one file."""
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer

    model = folder / "model"
    if torch.distributed.get_rank() == 0 and not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
    torch.distributed.barrier()
    return Checkpointer(
        folder / "checkpoints", model, CheckpointConfig(**{"timeout_seconds": WRITE_SECONDS, **settings})
    )


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, weights and optimiser, whole."""
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(str(path / "megatron"))
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def draws() -> list[float]:
    """The next number of each generator."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        named = torch.rand(()).item()
    return [random.random(), float(np.random.rand()), torch.rand(()).item(), named]


def save(checkpoints: Any, learner: Any, version: int) -> Path:
    checkpoints.start_save(learner, state_of(version))
    checkpoints.close()
    assert checkpoints.last_completed is not None, checkpoints.last_error
    return checkpoints.last_completed[1]


def across_layouts(rank: int, folder: str) -> None:
    """Each layout saves at step 2 and goes on to step 5; then each goes on from the checkpoint of each."""
    found: dict[Any, Any] = {}
    with session(rank, folder):
        for layout in LAYOUTS:
            with laid_out(layout):
                _save_and_go_on(layout, Path(folder), found)
        for layout in LAYOUTS:
            with laid_out(layout):
                for other in LAYOUTS:
                    _go_on_from(layout, other, Path(folder), found)
    torch.save(found, f"{folder}/layouts-{rank}.pt")


def _save_and_go_on(layout: Layout, folder: Path, found: dict[Any, Any]) -> None:
    learner = make_learner(layout)
    scramble(learner)
    checkpoints = checkpoints_in(folder / layout.name)
    for _ in range(2):
        step(learner)
    draws()
    checkpoints.start_save(learner, state_of(2))
    found[layout.name, "draws"] = draws()
    for _ in range(3):  # beside the writing
        step(learner)
    found[layout.name, "optimizers"] = len(learner.optimizer.optimizer.chained_optimizers)
    found[layout.name, "chunks"] = len(learner.chunks)
    found[layout.name] = tensors_of(save(checkpoints, learner, 5))


def _go_on_from(layout: Layout, other: Layout, folder: Path, found: dict[Any, Any]) -> None:
    from megatron_webrl.trainer.checkpoint import checkpointer

    learner = make_learner(layout)
    checkpointer.load(folder / other.name / "checkpoints" / "version-000002", learner)
    pair = (layout.name, other.name)
    found[pair, "draws"] = draws()
    found[pair, "rate"] = learner.optimizer.learning_rate
    for _ in range(3):
        step(learner)
    found[pair] = tensors_of(save(checkpoints_in(folder / f"{layout.name}-from-{other.name}"), learner, 5))


def troubles(rank: int, folder: str) -> None:
    """Saves that fail and the ones after them; what is written; what stays; what is refused."""
    found: dict[str, Any] = {}
    with session(rank, folder), laid_out(LAYOUTS[0]):
        learner = make_learner(LAYOUTS[0])
        scramble(learner)
        found["snapshot"] = _snapshot(learner, Path(folder, "snapshot"))
        found["limit"] = _no_room(learner, Path(folder, "limit"))
        found["killed writer"] = _killed_writer(learner, Path(folder, "killed"))
        found["late writer"] = _late_writer(learner, Path(folder, "late"))
        found["names"] = _names(learner, Path(folder, "names"))
        found["weights"] = _weights_alone(learner, Path(folder, "weights"))
        found["bf16"] = _small_updates(Path(folder, "bf16"))
    torch.save(found, f"{folder}/troubles-{rank}.pt")


def _snapshot(learner: Any, folder: Path) -> dict[str, Any]:
    """Weights and moments change while the writer is stopped: the checkpoint must have those of before."""
    checkpoints = checkpoints_in(folder)
    before = tensors_of(save(checkpoints, learner, 1))
    checkpoints.start_save(learner, state_of(2))
    writer = checkpoints._current.writing.pid
    os.kill(writer, signal.SIGSTOP)
    checkpoints.poll()
    waited_for = checkpoints._current is not None
    for _ in range(2):
        step(learner)
    os.kill(writer, signal.SIGCONT)
    checkpoints.close()
    after = tensors_of(checkpoints.last_completed[1])
    return {
        "equal": all(torch.equal(before[name], after[name]) for name in before),
        "tensors": len(before),
        "waited for": waited_for,
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
        "figures": checkpoints.pop_metrics(),
    }


def _no_room(learner: Any, folder: Path) -> dict[str, Any]:
    """One save under a limit of file sizes that the shards exceed, one without."""
    checkpoints = checkpoints_in(folder)
    save(checkpoints, learner, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    checkpoints.start_save(learner, state_of(2))
    checkpoints.wait_for_save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    torch.distributed.barrier()
    failed = {
        "trouble": checkpoints.last_error,
        "newest": checkpoints.last_completed[0],
        "figures": checkpoints.pop_metrics(),
        "left": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }
    torch.distributed.barrier()  # the next save makes its folder there
    save(checkpoints, learner, 3)
    return failed | {"then": (checkpoints.last_error, checkpoints.failures, checkpoints.last_completed[0])}


def _killed_writer(learner: Any, folder: Path) -> dict[str, Any]:
    checkpoints = checkpoints_in(folder)
    checkpoints.start_save(learner, state_of(1))
    if torch.distributed.get_rank() == 1:
        os.kill(checkpoints._current.writing.pid, signal.SIGKILL)
    checkpoints.wait_for_save()
    failed = (checkpoints.last_error, checkpoints.last_completed)
    save(checkpoints, learner, 2)
    return {"failed": failed, "then": checkpoints.last_completed[0]}


def _late_writer(learner: Any, folder: Path) -> str | None:
    checkpoints = checkpoints_in(folder, seconds=0.2)
    checkpoints.start_save(learner, state_of(1))
    os.kill(checkpoints._current.writing.pid, signal.SIGSTOP)
    checkpoints.wait_for_save()
    return checkpoints.last_error


def _names(learner: Any, folder: Path) -> dict[str, Any]:
    """Versions 1 to 7 with two kept and every third; then version 7 again."""
    checkpoints = checkpoints_in(folder, keep=2, keep_every=3)
    for version in range(1, 8):
        save(checkpoints, learner, version)
    stay = sorted(path.name for path in (folder / "checkpoints").iterdir())
    again = save(checkpoints_in(folder, keep=2, keep_every=3), learner, 7)
    return {"stay": stay, "again": again.name, "then": sorted(p.name for p in (folder / "checkpoints").iterdir())}


def _weights_alone(learner: Any, folder: Path) -> dict[str, Any]:
    """Weights without an optimiser, as the conversion tool writes them, then broken in several ways."""
    from megatron.core import dist_checkpointing

    from megatron_webrl.trainer.checkpoint import checkpointer
    from megatron_webrl.trainer.checkpoint.checkpoint_state import sharded_weights
    from megatron_webrl.trainer.checkpoint.checkpointer import CheckpointError

    def write(name: str, change: Any = lambda state: None) -> Path:
        state = sharded_weights(learner.chunks)
        change(state["model0"])
        target = folder / name / "megatron"
        target.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        dist_checkpointing.save(state, str(target))
        return target.parent

    def refusal(path: Path, load: Any = None) -> str:
        other = make_learner(LAYOUTS[0])
        try:
            load(path, other) if load else checkpointer.load_weights(path, other.chunks)
        except CheckpointError as error:
            return str(error)
        return "loaded"

    def misshapen(state: dict[str, Any]) -> None:
        from megatron.core.dist_checkpointing import ShardedTensor

        state[norm] = ShardedTensor.from_rank_offsets(norm, torch.ones(5), replica_id=torch.distributed.get_rank())

    norm = "decoder.final_layernorm.weight"
    whole = write("whole")
    other = make_learner(LAYOUTS[0])
    checkpointer.load_weights(whole, other.chunks)
    pairs = zip(learner.chunks[0].parameters(), other.chunks[0].parameters(), strict=True)
    found = {"equal": all(torch.equal(one, two) for one, two in pairs)}
    found |= {"resume": refusal(whole, checkpointer.load), "none": refusal(folder / "nowhere")}
    found["missing"] = refusal(write("missing", lambda state: state.pop(norm)))
    found["misshapen"] = refusal(write("misshapen", misshapen))
    extra = write("extra", lambda state: state.update(_extra(norm, state[norm])))
    found["extra"] = refusal(extra)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file = max((whole / "megatron").glob("*.distcp"), key=lambda path: path.stat().st_size)
        os.truncate(file, file.stat().st_size - 100)
    torch.distributed.barrier()
    found["truncated"] = refusal(whole)
    return found


def _extra(name: str, tensor: Any) -> dict[str, Any]:
    from dataclasses import replace

    return {"more": replace(tensor, key=f"{name}.more")}


def _small_updates(folder: Path) -> dict[str, Any]:
    """200 updates of a bf16 model, each far below its resolution; a checkpoint and a resume after 100."""
    from megatron_webrl.trainer.checkpoint import checkpointer

    rate = OptimizerConfig(learning_rate=1e-4, schedule="constant", warmup_fraction=0, weight_decay=0, clip_norm=1e9)

    def train(learner: Any, count: int) -> None:
        for _ in range(count):
            for chunk in learner.chunks:
                chunk.zero_grad_buffer()
                for parameter in chunk.parameters():
                    parameter.main_grad.fill_(1.0)
            learner.optimizer.step()

    learner = make_learner(LAYOUTS[0], torch.bfloat16, rate, steps=200)
    checkpoints = checkpoints_in(folder)
    train(learner, 1)
    first = next(learner.chunks[0].parameters()).float().max().item()
    train(learner, 99)
    halfway = save(checkpoints, learner, 100)
    train(learner, 100)
    whole = tensors_of(save(checkpoints, learner, 200))
    resumed = make_learner(LAYOUTS[0], torch.bfloat16, rate, steps=200)
    checkpointer.load(halfway, resumed)
    train(resumed, 100)
    again = tensors_of(save(checkpoints_in(folder / "again"), resumed, 200))
    plain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    adam = torch.optim.AdamW([plain], lr=1e-4, weight_decay=0)
    for _ in range(200):
        plain.grad = torch.ones_like(plain)
        adam.step()
    return {
        "after one": first,
        "bf16": next(learner.chunks[0].parameters()).float().max().item(),
        "main": max(float(t.max()) for name, t in whole.items() if name.startswith("optimizer.state.param.")),
        "types": {str(t.dtype) for name, t in whole.items() if name.startswith("optimizer.state.param.")},
        "without main": plain.max().item(),
        "resumed equal": all(torch.equal(tensor, again[name]) for name, tensor in whole.items()),
    }


def full_disk(rank: int, folder: str, disk: str) -> None:
    """Saves on a small file system: full, read-only, and neither."""
    import json
    import subprocess

    found = {}
    with session(rank, folder), laid_out(LAYOUTS[0]):
        learner = make_learner(LAYOUTS[0])
        checkpoints = checkpoints_in(Path(disk))
        found["full"] = _try_to_save(
            checkpoints, learner, 1, lambda: Path(disk, "other").write_bytes(bytes(60 * 2**20))
        )
        found["read only"] = _try_to_save(
            checkpoints, learner, 2, lambda: subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        )

        def make_room() -> None:
            subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
            Path(disk, "other").unlink()

        found["then"] = _try_to_save(checkpoints, learner, 3, make_room)
    Path(folder, f"disk-{rank}.json").write_text(json.dumps(found))


def _try_to_save(checkpoints: Any, learner: Any, version: int, prepare: Any) -> list[Any]:
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        prepare()
    torch.distributed.barrier()
    checkpoints.start_save(learner, state_of(version))
    checkpoints.wait_for_save()
    return [checkpoints.last_error, checkpoints.failures, checkpoints.last_completed and checkpoints.last_completed[0]]
