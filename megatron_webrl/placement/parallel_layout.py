"""Check the parallel sizes against the dimensions of the model."""

from __future__ import annotations

from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.hf_config import cpu_engine_obstacle, has_experts, has_linear_attention
from megatron_webrl.model.layer_split import check_divides

MIN_IMAGE_BUFFER_MIB = 512


def check_parallel_layout(config: Config, description: dict[str, Any]) -> None:
    """Raise ConfigError for sizes that cannot split the model. `description`: its config.json."""
    text, trainer = description["text_config"], config.trainer
    sparse = has_experts(description)
    text = {"num_experts": text.get("num_local_experts"), **text}  # transformers 5 writes num_local_experts
    heads = trainer.tensor_parallel * trainer.context_parallel
    heads_name = "tensor_parallel" if trainer.context_parallel == 1 else "tensor_parallel x context_parallel"
    divided = [(heads_name, heads, name) for name in ("num_attention_heads", "num_key_value_heads")]
    if sparse:
        divided.append(("expert_parallel", trainer.expert_parallel, "num_experts"))
        divided.append(("expert_tensor_parallel", trainer.expert_tensor_parallel, "moe_intermediate_size"))
    else:
        divided.append(("tensor_parallel", trainer.tensor_parallel, "intermediate_size"))
    for setting_name, size, name in divided:
        source = " x ".join(f"trainer.{part}" for part in setting_name.split(" x "))
        check_divides(setting_name, size, name, text[name], source)
    if config.model.platform == "cpu" and (obstacle := cpu_engine_obstacle(description, config.engine_dtype)):
        raise ConfigError(f"model.path={config.model.path}: {obstacle}; set rollout.dtype=bfloat16 for such a model")
    if has_linear_attention(description):
        _check_linear_attention(config, text, sparse)
    _check_parallel(config, text["num_hidden_layers"], sparse)
    _check_engine_layout(config, text, description["vision_config"], sparse)
    if config.rollout.max_model_len > text["max_position_embeddings"]:
        raise ConfigError(
            f"rollout.max_model_len={config.rollout.max_model_len} exceeds "
            f"max_position_embeddings={text['max_position_embeddings']} of {config.model.path}"
        )


def _check_linear_attention(config: Config, text: dict[str, Any], sparse: bool) -> None:
    trainer, rollout, path = config.trainer, config.rollout, config.model.path
    if trainer.context_parallel > 1:
        raise ConfigError(
            f"trainer.context_parallel={trainer.context_parallel} cannot split the state of the linear attention of "
            f"{path}; set it to 1"
        )
    if trainer.merge_prefixes == "all":
        raise ConfigError(
            f"trainer.merge_prefixes=all would have the linear attention of {path} hand its state to several "
            "continuations; set auto or trajectory: the beginnings that episodes have in common are then computed "
            "once for each"
        )
    dimensions = ["linear_num_key_heads", "linear_num_value_heads"]
    dimensions += ["shared_expert_intermediate_size"] if sparse else []
    for part, size in (("trainer", trainer.tensor_parallel), ("rollout", rollout.tensor_parallel)):
        for name in dimensions:
            check_divides("tensor_parallel", size, name, text[name], f"{part}.tensor_parallel")


def image_buffer_mib(config: Config, patch_size: int, spatial_merge_size: int) -> int:
    """MiB of a trainer rank's shared memory for the largest screenshot, encoded and as patches; 0: no image workers."""
    if not config.trainer.image_workers:
        return 0
    # One token stands for a square of patches; an encoded image is at most about as large as its pixels.
    side = patch_size * spatial_merge_size
    largest = -(-2 * config.rollout.max_model_len * side**2 * 3 // 2**20)
    return max(MIN_IMAGE_BUFFER_MIB, largest)


def _check_parallel(config: Config, layers: int, sparse: bool) -> None:
    trainer, path = config.trainer, config.model.path
    chunks = trainer.pipeline_parallel * trainer.virtual_pipeline
    if trainer.virtual_pipeline > 1 and trainer.pipeline_parallel == 1:
        raise ConfigError(
            f"trainer.virtual_pipeline={trainer.virtual_pipeline} needs trainer.pipeline_parallel of at least 2"
        )
    if chunks > layers:
        raise ConfigError(
            f"trainer.pipeline_parallel x virtual_pipeline = {chunks} exceeds the {layers} layers of {path}; lower them"
        )
    experts, ranks = (
        trainer.expert_parallel * trainer.expert_tensor_parallel,
        trainer.tensor_parallel * trainer.context_parallel * trainer.data_parallel,
    )
    if not sparse and trainer.experts != "auto":
        raise ConfigError(
            f"trainer.experts={trainer.experts} needs a mixture of experts, but {path} is dense; set auto"
        )
    if not sparse and experts > 1:
        raise ConfigError(
            f"trainer.expert_parallel={trainer.expert_parallel} and trainer.expert_tensor_parallel="
            f"{trainer.expert_tensor_parallel} need a mixture of experts, but {path} is dense; set both to 1"
        )
    check_divides(
        "expert_parallel x expert_tensor_parallel",
        experts,
        "tensor_parallel x context_parallel x data_parallel",
        ranks,
        "trainer.expert_parallel",
    )


def _check_engine_layout(config: Config, text: dict[str, Any], vision: dict[str, Any], sparse: bool) -> None:
    """Raise ConfigError for engine sizes into which vLLM cannot split the model."""
    rollout, path = config.rollout, config.model.path
    size, kv_heads = rollout.tensor_parallel, text["num_key_value_heads"]
    divided = [("num_attention_heads", text)]
    if not config.vision_data_parallel:
        divided += [("num_heads", vision), ("intermediate_size", vision)]
    if not sparse:
        divided.append(("intermediate_size", text))
    elif rollout.expert_parallel:
        divided.append(("num_experts", text))
    else:
        divided.append(("moe_intermediate_size", text))
    for name, section in divided:
        check_divides("tensor_parallel", size, name, section[name], "rollout.tensor_parallel")
    if kv_heads % size and size % kv_heads:
        raise ConfigError(
            f"rollout.tensor_parallel={size} neither divides num_key_value_heads={kv_heads} of {path} nor is a "
            "multiple of it"
        )
    if rollout.expert_parallel and not sparse:
        raise ConfigError(f"rollout.expert_parallel=true needs a mixture of experts, but {path} is dense")
    if rollout.pipeline_parallel > text["num_hidden_layers"]:
        raise ConfigError(
            f"rollout.pipeline_parallel={rollout.pipeline_parallel} exceeds the {text['num_hidden_layers']} layers "
            f"of {path}"
        )
