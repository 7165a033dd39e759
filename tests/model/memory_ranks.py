"""One gloo process that measures memory and scores a long sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests import gloo
from tests.model import tiny

LONG = tiny.Shape(window=16384)
RECOMPUTE = ("none", "selective", "full")


def long_sample() -> tiny.Sample:
    """A sample that fills the longest window: images of different sizes in the text, a short response."""
    grids = [[1, 64, 48], [1, 32, 96], [1, 96, 64]]
    visual = sum(h * w // tiny.MERGE**2 + 5 for _, h, w in grids)
    return tiny.make_sample(grids, text=LONG.window - visual - 64, response=64, seed=11)


def run(rank: int, folder: str) -> None:
    """Write log-probabilities of the long sample, and bytes kept for the backward pass, to found.pt."""
    platform = gloo.join(rank, 1, folder)
    from megatron_webrl.model import process_groups
    from megatron_webrl.model.layout import ParallelSizes

    process_groups.init_process_groups(ParallelSizes())
    saved = {recompute: _saved_bytes(Path(folder) / "sparse", recompute, platform) for recompute in RECOMPUTE}
    torch.save({"long": _long(Path(folder) / "long", platform), "saved": saved}, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def _build(folder: Path, platform: Any, recompute: str = "none") -> Any:
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions

    [model] = build_model(folder, dtype="float32", platform=platform, options=ComputeOptions(recompute=recompute))  # type: ignore[arg-type]
    load_hf([model], folder)
    return model


def _long(folder: Path, platform: Any) -> Tensor:
    row, _ = tiny.pack([long_sample()])
    with torch.no_grad():
        logits: Tensor = _build(folder, platform)(row)
    return logits[:, : tiny.VOCABULARY]


def _saved_bytes(folder: Path, recompute: str, platform: Any) -> int:
    """Bytes saved for the backward pass, each storage counted once, without weights."""
    model = _build(folder, platform, recompute).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, int] = {}
    kept: list[Tensor] = []  # so that no address is reused

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    row, _ = tiny.pack([sample for sample in tiny.samples().values() if not len(sample.grids)] * 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(row)
    return sum(seen.values())
