"""Cases of the checkpoint tests: weights without an optimiser, and updates below bfloat16's resolution."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.trainer import OptimizerConfig
from tests.trainer.checkpoint.small_learner import LAYOUTS, checkpoints_in, make_learner, save, tensors_of


def weights_alone(learner: Any, folder: Path) -> dict[str, Any]:
    """Load weights without an optimiser, as the conversion tool writes them; then broken ones."""
    from megatron.core import dist_checkpointing

    from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner, load_weights, sharded_weights

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
            load(path, other) if load else load_weights(path, other.chunks)
        except CheckpointError as error:
            return str(error)
        return "loaded"

    def misshapen(state: dict[str, Any]) -> None:
        from megatron.core.dist_checkpointing import ShardedTensor

        state[norm] = ShardedTensor.from_rank_offsets(norm, torch.ones(5), replica_id=torch.distributed.get_rank())

    norm = "decoder.final_layernorm.weight"
    whole = write("whole")
    other = make_learner(LAYOUTS[0])
    load_weights(whole, other.chunks)
    pairs = zip(learner.chunks[0].parameters(), other.chunks[0].parameters(), strict=True)
    found = {"equal": all(torch.equal(one, two) for one, two in pairs)}
    found |= {"resume": refusal(whole, load_learner), "none": refusal(folder / "nowhere")}
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
    return {"more": replace(tensor, key=f"{name}.more")}


def small_updates(folder: Path) -> dict[str, Any]:
    """200 updates of a bf16 model, each far below its resolution; a checkpoint and a resume after 100."""
    from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner

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
    load_learner(halfway, resumed)
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
