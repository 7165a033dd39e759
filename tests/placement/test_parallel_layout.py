"""Parallel sizes into which the layers of Qwen3.5 cannot be split."""

from __future__ import annotations

import pytest

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.parameter_counts import QWEN3_5_NAMES, config_sections
from megatron_webrl.placement.memory_estimate import check_parallel_layout

GPUS = ("cluster.gpus_per_node=8", "cluster.engine_gpus_per_node=4", "cluster.nodes=4", "trainer.data_parallel=0",
        "rollout.engines=0", "model.dtype=bfloat16")  # fmt: skip


@pytest.mark.parametrize("name", QWEN3_5_NAMES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_every_released_size_can_be_split(name: str, tensor: int) -> None:
    overrides = [*GPUS, f"trainer.tensor_parallel={tensor}", "rollout.tensor_parallel=4"]
    check_parallel_layout(parse_config(None, overrides), config_sections(name))


def test_heads_of_linear_attention_are_split_too() -> None:
    description = config_sections("Qwen3.5-9B")
    description["text_config"]["linear_num_key_heads"] = 6
    for overrides, source in ((["trainer.tensor_parallel=4"], "trainer"), (["rollout.tensor_parallel=4"], "rollout")):
        config = parse_config(None, [*GPUS, "trainer.tensor_parallel=1", *overrides])
        with pytest.raises(ConfigError, match=f"does not divide linear_num_key_heads=6 .{source}.tensor_parallel"):
            check_parallel_layout(config, description)
