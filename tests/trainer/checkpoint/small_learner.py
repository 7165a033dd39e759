"""A small mixture-of-experts learner on two gloo processes, and its checkpoints, for the checkpoint tests.

The model is Megatron's own GPT: it has a dense and an expert optimiser, pipeline stages and virtual ones. Its gradient
is a function of the weights, so that it does not depend on the layout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.trainer import CheckpointConfig, OptimizerConfig
from megatron_webrl.model.layout import ParallelSizes

LAYOUTS = {
    "replicas": ParallelSizes(),
    "tensor": ParallelSizes(tensor=2),
    "pipeline": ParallelSizes(pipeline=2),
    "virtual": ParallelSizes(pipeline=2, virtual=2),
    "expert": ParallelSizes(expert=2),
}
EXPERTS, LAYERS = 2, 4
WRITE_TIMEOUT_SECONDS = 100.0  # a slow write fails by name, long before the test times out


def make_learner(
    layout: ParallelSizes,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerConfig | None = None,
    steps: int = 10,
    keep: str = "device",
) -> Any:
    """A small mixture of experts in this layout; its weights depend on their names only."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import TransformerConfig

    from megatron_webrl.trainer.learner import Learner
    from megatron_webrl.trainer.optimizer import make_optimizer, wrap_ddp

    virtual = layout.virtual if layout.virtual > 1 else None
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=16, ffn_hidden_size=24, moe_ffn_hidden_size=24, num_attention_heads=2,
        num_moe_experts=EXPERTS, moe_router_topk=2, add_bias_linear=False, normalization="RMSNorm",
        params_dtype=dtype, bf16=dtype is torch.bfloat16, pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual, expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1, use_cpu_initialization=True, gradient_accumulation_fusion=False,
    )  # fmt: skip
    models = []
    for number in range(layout.virtual):
        stage = {"ignore_virtual": False, "vp_stage": None if virtual is None else number}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=stage["vp_stage"])
        model = GPTModel(
            config, spec, vocab_size=32, max_sequence_length=16, position_embedding_type="rope",
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=False, vp_stage=stage["vp_stage"],
        )  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1.0)
        models.append(model)
    chunks = wrap_ddp(models)
    settings = optimizer or OptimizerConfig(learning_rate=1e-3, clip_norm=1e9, keep=keep)
    return Learner(chunks, 32, make_optimizer(chunks, settings, steps, dtype))


def step(learner: Any) -> None:
    """One optimiser step. The gradient is a function of the weights."""
    for chunk in learner.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.copy_(0.1 * torch.sin(37 * parameter.detach().float()) + 0.01)
    learner.optimizer.step()


def scramble(learner: Any) -> None:
    """Give every weight a value of its own: a function of its position in the whole tensor, in any layout."""
    from megatron_webrl.trainer.checkpoint.checkpoint_state import sharded_tensors, sharded_weights

    with torch.no_grad():
        for tensor in sharded_tensors(sharded_weights(learner.chunks)):
            position = sum(
                (torch.arange(size) + offset).reshape([-1] + [1] * (tensor.data.dim() - axis - 1)) * 7 ** (axis + 1)
                for axis, (size, offset) in enumerate(
                    zip(tensor.data.shape, tensor.global_offset[-tensor.data.dim() :], strict=True)
                )
            )
            tensor.data.copy_(torch.sin(position.float() + len(tensor.key)) * 0.5 + 1)
    with learner.optimizer.resident():
        learner.optimizer.optimizer.reload_model_params()


def state_of(version: int) -> Any:
    from megatron_webrl.trainer.checkpoint.checkpointer import TrainerState

    return TrainerState(version, 0, 4, (5,), {"trained": 8}, 1)


def checkpoints_in(folder: Path, timeout_seconds: float = WRITE_TIMEOUT_SECONDS, **settings: Any) -> Any:
    """A checkpointer on `folder`, with a model folder of two small files."""
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer

    model = folder / "model"
    if torch.distributed.get_rank() == 0 and not model.exists():
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").write_bytes(b"weights")
    torch.distributed.barrier()
    return Checkpointer(folder / "checkpoints", model, CheckpointConfig(**settings), timeout_seconds=timeout_seconds)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(str(path / "megatron"))
    return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}


def save(checkpoints: Any, learner: Any, version: int) -> Path:
    checkpoints.start_save(learner, state_of(version))
    checkpoints.close()
    assert checkpoints.last_completed is not None, checkpoints.last_error
    return checkpoints.last_completed[1]
