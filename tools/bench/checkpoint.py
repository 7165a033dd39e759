"""Time that a checkpoint blocks training, asynchronous and synchronous.

    python -m tools.bench.checkpoint [--quick] [--json FILE]

Two gloo processes with one thread each train a random Qwen3-VL of about 100 M parameters in each layout. An update is
one optimiser step on constant gradients, which shows the slow-down by a concurrent write.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.config.trainer import CheckpointConfig
from megatron_webrl.util import torchvision_shim
from tools.arguments import make_bench_parser, write_json
from tools.make_tiny_model import make_tiny_model

CHECKPOINTS = 3
MODEL = {"hidden": 768, "layers": 12, "heads": 12, "kv_heads": 4, "head_dim": 64, "intermediate": 2816}


def measure(rank: int, folder: str, model: str) -> None:
    """Body of a rank: alternate saves and updates for each layout and mode; the first rank writes the figures."""
    torchvision_shim.install()
    torch.set_num_threads(1)
    from megatron_webrl.model import platform as platforms

    platform = platforms.activate("cpu")
    torch.distributed.init_process_group(
        platform.backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=300),
    )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    rows = []
    for tensor_parallel in (2, 1):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
        model_parallel_cuda_manual_seed(1)
        for asynchronous in (False, True):
            rows.append(_one(Path(folder), model, platform, tensor_parallel, asynchronous))
        parallel_state.destroy_model_parallel()
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(rows))
    torch.distributed.destroy_process_group()


def _one(folder: Path, model: str, platform: Any, tensor_parallel: int, asynchronous: bool) -> dict[str, Any]:
    from megatron_webrl.trainer.checkpoint.checkpointer import Checkpointer, TrainerState
    from megatron_webrl.trainer.main import load_model, make_learner

    config = Config()
    config.model.path = model
    config.trainer.tensor_parallel, config.trainer.data_parallel = tensor_parallel, 2 // tensor_parallel
    learner = make_learner(config, load_model(config, platform))
    checkpoints = Checkpointer(folder / f"{tensor_parallel}-{asynchronous}", Path(model), CheckpointConfig())
    blocked, concurrent, alone, written, size = [], [], [], [], 0.0
    alone += [_update(learner) for _ in range(3)]
    for version in range(CHECKPOINTS):
        begun = time.monotonic()
        checkpoints.start_save(learner, TrainerState(version, 0, 0, (), {}, 0))
        if not asynchronous:
            checkpoints.wait_for_save()
        blocked.append(time.monotonic() - begun)
        concurrent.append(_update(learner))
        checkpoints.wait_for_save()
        figures = checkpoints.pop_metrics()
        written.append(figures["checkpoint/write_seconds"])
        size = figures["checkpoint/size_mib"]
    checkpoints.close()
    return {
        "tensor_parallel": tensor_parallel,
        "asynchronous": asynchronous,
        "mib": size,
        "blocked": blocked,
        "written": written,
        "update": alone,
        "update_during_write": concurrent,
    }


def _update(learner: Any) -> float:
    begun = time.monotonic()
    for chunk in learner.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(1e-3)
    learner.optimizer.step()
    return time.monotonic() - begun


def main() -> None:
    """Command line."""
    parser = make_bench_parser(__doc__, "a tiny model")
    parser.add_argument("--folder", type=Path, help="folder for the checkpoints (default: temporary)")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = make_tiny_model(Path(folder, "model"), **({} if options.quick else MODEL))  # type: ignore[arg-type]
        torch.multiprocessing.spawn(measure, args=(folder, str(model)), nprocs=2)
        rows = json.loads(Path(folder, "figures.json").read_text())
    print(
        "| layout | mode | MiB | blocked, s | written, s | update, s | update during the write, s |\n"
        + "|---" * 7
        + "|"
    )
    for row in rows:
        figures = (
            f"{statistics.median(row[name]):.2f}" for name in ("blocked", "written", "update", "update_during_write")
        )
        layout = "tensor-parallel 2" if row["tensor_parallel"] == 2 else "two replicas"
        mode = "asynchronous" if row["asynchronous"] else "synchronous"
        print(f"| {layout} | {mode} | {row['mib']:.0f} | {' | '.join(figures)} |")
    write_json(options.json, rows)


if __name__ == "__main__":
    main()
