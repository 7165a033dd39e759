"""Write the loading-form shapes of each worker of a vLLM engine: {rank: {parameter: shape}}.

Arguments: a model's folder, JSON with the engine's sizes, the file to write.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_webrl.control import child_process
from megatron_webrl.util import torchvision_shim


def loading_shapes(worker: Any) -> tuple[int, dict[str, tuple[int, ...]]]:
    """A worker's rank, and the loading form's shape of each of its parameters."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    model = worker.model_runner.get_model()
    found, seen = {}, set()
    for prefix, module in model.named_modules():
        info = LAYERWISE_INFO.get(module)
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            loading = info.restore_metadata[0].get(name) if info else None
            found[f"{prefix}.{name}"] = tuple((parameter if loading is None else loading).shape)
    return worker.rank, found


def main() -> None:
    """Start the engine and collect the shapes from its workers."""
    child_process.die_with_parent()
    folder, sizes, report = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the function is pickled to the workers
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "TORCH_COMPILE_DISABLE": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    torchvision_shim.install()
    from vllm import LLM

    engine = LLM(
        model=folder,
        enforce_eager=True,
        kv_cache_memory_bytes=32 * 2**20,
        max_model_len=1024,
        limit_mm_per_prompt={"image": 1, "video": 0},
        **sizes,
    )
    Path(report).write_text(json.dumps(dict(engine.llm_engine.collective_rpc(loading_shapes))))
    engine.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
