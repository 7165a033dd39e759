"""Rank bodies of the tests of trainer.layers=auto and of the compilation of SwiGLU."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from unittest import mock

import torch

from tests.trainer.checkpoint.small_learner import session

PACKAGE = "transformer_engine.pytorch"


def choose(rank: int, folder: str) -> None:
    """Write the layers that this rank takes: on CUDA with the package on no, one and all ranks, and on the CPU."""
    from megatron_webrl.model.platform import Platform
    from megatron_webrl.trainer import main
    from megatron_webrl.trainer.main import choose_compilation, choose_layers

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
        compiled = [choose_compilation(cpu, torch.float32)]
        for problem in ("", "no C compiler" if rank else ""):
            with mock.patch.object(main, "compilation_problem", return_value=problem):
                compiled.append(choose_compilation(cuda, torch.float32))
        Path(folder, f"compiled-{rank}").write_text(" ".join(map(str, compiled)))
