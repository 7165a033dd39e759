"""Build the engines of configurations on the meta device, with vLLM's GPU build and a fake GPU.

    python -m tools.gpu_proof.engines CARD FOLDER CONFIG...

with the variables of `fake_gpu.environment`. It prints a line with an `Engine` as JSON for each; FOLDER gets the
models' config.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.model import parameter_counts
from megatron_webrl.placement.memory_estimate import check_memory, estimate_memory
from tools.gpu_proof import fake_gpu

ENGINE_LINE = "engine: "  # begins a line of output
CLASSES = {
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


@dataclass
class Engine:
    """What vLLM makes of a configuration on a card."""

    config: str
    card: str
    gpu_gib: float = 0.0  # by cluster.gpu_gib
    ranks: int = 0
    reloaded: int = 0  # parameters of all ranks that an update cannot write in place
    gib: float = 0.0  # of the parameters of the largest rank
    engine_gib: float = 0.0  # of all ranks
    predicted_gib: float = 0.0  # of the largest rank, by `webrl placement --memory`
    cache_bytes: int = 0  # of one token in the KV cache of the rank with the most
    predicted_cache_bytes: float = 0.0  # 0: not predicted by the token, as for linear attention
    runner: str = ""  # V1 or V2
    requests: int = 0  # at a time, at most
    graphs: list[int] = field(default_factory=list)  # numbers of tokens of the decode graphs
    graph_mode: str = ""
    batch_tokens: int = 0
    backends: list[str] = field(default_factory=list)  # of attention, experts, linear attention
    error: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Build engines on the meta device, as on a card.")
    parser.add_argument("card", choices=tuple(fake_gpu.CARDS))
    parser.add_argument("folder", type=Path, help="for the models' configurations")
    parser.add_argument("configs", nargs="+", type=Path)
    options = parser.parse_args()
    fake_gpu.install(fake_gpu.CARDS[options.card])
    for path in options.configs:
        sys.stdout.write(f"{ENGINE_LINE}{json.dumps(asdict(build(path, options.card, options.folder)))}\n")
        sys.stdout.flush()


def build(path: Path, card: str, folder: Path) -> Engine:
    """Configure and build the ranks of one engine; an error of any kind is the result's."""
    engine = Engine(path.stem, card)
    try:
        config = parse_config(path, ["model.platform=cuda"])
        engine.gpu_gib = config.cluster.gpu_gib
        if size := parameter_counts.size_from_path(config.model.path):
            estimate = estimate_memory(config, parameter_counts.config_sections(size))
            check_memory(config, estimate)
            engine.predicted_gib = estimate.engine.parameters / 2**30
            if size not in parameter_counts.QWEN3_5_NAMES:
                engine.predicted_cache_bytes = estimate.engine.kv_cache / estimate.kv_cache_tokens
            config.model.path = str(released_model(size, folder))
        _build(config, engine)
    except Exception as error:
        traceback.print_exc()
        engine.error = f"{type(error).__name__}: {error}"
    return engine


def released_model(size: str, folder: Path) -> Path:
    """A folder with the config.json of a released size."""
    path, hf_config = folder / size, parameter_counts.make_hf_config(size)
    hf_config.architectures, hf_config.dtype = [CLASSES[hf_config.model_type]], "bfloat16"
    hf_config.save_pretrained(path)
    return path


def _build(config: Config, engine: Engine) -> None:
    from megatron_webrl.rollout.engine import vllm_environment

    os.environ.update(vllm_environment.engine_environment(config))
    from vllm.model_executor.models import registry

    with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):  # which would see no GPU
        vllm_config = vllm_environment.engine_config(config, 0)
    engine.runner = "V2" if vllm_config.use_v2_model_runner else "V1"
    engine.requests = vllm_config.scheduler_config.max_num_seqs
    engine.batch_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    compilation = vllm_config.compilation_config
    engine.graphs, engine.graph_mode = compilation.cudagraph_capture_sizes, compilation.cudagraph_mode.name
    backends: Counter[str] = Counter()
    for rank in range(config.ranks_per_engine):
        with _distributed(config, vllm_config, rank), fake_gpu.on_meta():
            _add_rank(config, vllm_config, rank, engine, backends)
    engine.backends = sorted(backends)


def _add_rank(config: Config, vllm_config: Any, rank: int, engine: Engine, backends: Counter[str]) -> None:
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from megatron_webrl.weights.engine_map import EngineSizes, check_engine_sizes, engine_parameter_shapes
    from megatron_webrl.weights.vllm_target import ModelTarget

    rollout, hf_config = config.rollout, vllm_config.model_config.hf_config
    sizes = EngineSizes(rollout.tensor_parallel, rollout.pipeline_parallel, rollout.expert_parallel)
    check_engine_sizes(hf_config, sizes)
    with set_default_torch_dtype(vllm_config.model_config.dtype):
        model = initialize_model(vllm_config)
        process_weights_after_loading(model, vllm_config.model_config, torch.device("meta"))
    expected = engine_parameter_shapes(hf_config, sizes, rank)
    target = ModelTarget(model, vllm_config, torch.device("meta"), expected)  # ValueError if they differ
    engine.ranks += 1
    engine.reloaded += list(target.load_paths().values()).count("reload")
    gib = sum(target.bytes_by_load_path().values()) / 2**30
    engine.gib, engine.engine_gib = max(engine.gib, gib), engine.engine_gib + gib
    specs = [
        module.get_kv_cache_spec(vllm_config) for module in model.modules() if hasattr(module, "get_kv_cache_spec")
    ]
    caches = [spec for spec in specs if isinstance(spec, FullAttentionSpec)]
    engine.cache_bytes = max(engine.cache_bytes, sum(spec.real_page_size_bytes // spec.block_size for spec in caches))
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        for part in (getattr(module, "impl", None), getattr(method, "unquantized_backend", None)):
            if part is not None:
                backends[getattr(part, "name", type(part).__name__)] += 1
        if delta_rule := getattr(module, "gdn_prefill_backend", ""):
            backends[f"delta rule {delta_rule}"] += 1


@contextmanager
def _distributed(config: Config, vllm_config: Any, rank: int) -> Iterator[None]:
    """Context of one of vLLM's ranks, whose process groups reach nobody."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    size, new_group, group = config.ranks_per_engine, dist.new_group, parallel_state.GroupCoordinator.__init__

    def without_devices(self: Any, *arguments: Any, **options: Any) -> None:
        group(self, *arguments, **options | {"use_device_communicator": False, "use_message_queue_broadcaster": False})

    vllm_config.parallel_config.rank = rank
    with (
        set_current_vllm_config(vllm_config),
        mock.patch.object(dist, "new_group", lambda ranks=None, *_, **__: new_group(ranks, backend="fake")),
        mock.patch.object(parallel_state.GroupCoordinator, "__init__", without_devices),
        mock.patch.object(parallel_state, "in_the_same_node_as", return_value=[True] * size),
    ):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        try:
            parallel_state.init_distributed_environment(size, rank, "env://", rank, "fake")
            rollout = config.rollout
            parallel_state.ensure_model_parallel_initialized(
                rollout.tensor_parallel, rollout.pipeline_parallel, backend="fake"
            )
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            vllm_config.compilation_config.static_forward_context.clear()
            vllm_config.compilation_config.static_all_moe_layers.clear()


if __name__ == "__main__":
    main()
