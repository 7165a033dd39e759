"""Rank bodies of the test of trainer.layers=auto."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch

from tests.trainer.checkpoint.small_learner import session

PACKAGE = "transformer_engine.pytorch"


def choose(rank: int, folder: str) -> None:
    """Write the layers that this rank takes: on CUDA with the package on no, one and all ranks, and on the CPU."""
    from megatron_webrl.model.platform import Platform
    from megatron_webrl.trainer.factory import choose_layers

    with session(rank, folder) as cpu:
        cuda = Platform("cuda", torch.device("cpu"), "gloo")
        found = [choose_layers(cuda)]
        for ranks in ((1,), (0, 1)):
            if rank in ranks:  # as if it were installed
                sys.modules["transformer_engine"] = types.ModuleType("transformer_engine")
                sys.modules[PACKAGE] = types.ModuleType(PACKAGE)
            found.append(choose_layers(cuda))
        found.append(choose_layers(cpu))
        Path(folder, f"layers-{rank}").write_text(" ".join(found))
