"""Gloo processes of the Qwen3.5 tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.model import tiny
from tests.model.layout_ranks import Case, run_cases
from tests.model.qwen3_5 import small

CASES: dict[int, dict[str, Case]] = {
    1: {"tp1": Case({}), "tp1 selective": Case({}, recompute="selective"), "tp1 full": Case({}, recompute="full")},
    2: {
        "tp2": Case({"tensor": 2}, sequence_parallel=False),
        "tp2 sp": Case({"tensor": 2}),
        "pp2": Case({"pipeline": 2}),
        "dp2": Case({}),
        "ep2": Case({"expert": 2}),
        "ep2 tp2": Case({"tensor": 2, "expert": 2}),
    },
    4: {
        "pp4": Case({"pipeline": 4}),
        "tp2 pp2": Case({"tensor": 2, "pipeline": 2}, sequence_parallel=False),
        "tp2 sp pp2": Case({"tensor": 2, "pipeline": 2}, recompute="full"),
        "ep2 pp2": Case({"pipeline": 2, "expert": 2}),
    },
}


def models(case: Case) -> list[str]:
    """Models that a case is valid for."""
    return [name for name, shape in small.MODELS.items() if case.fits(small.KEY_VALUE_HEADS, shape.experts)]


def pairs(*ranks: int) -> list[tuple[int, str, str]]:
    """Ranks, case and model of all comparisons on these numbers of ranks."""
    return [(number, case, model) for number in ranks for case, what in CASES[number].items() for model in models(what)]


def run(rank: int, ranks: int, folder: str) -> None:
    """Write the results of every case of `ranks` processes to found-RANKS-CASE-MODEL.pt."""

    def examine_more(name: str, path: Path, platform: Any) -> dict[str, Any]:
        return packed(path, platform) if name == "tp1" else {}

    run_cases(rank, ranks, folder, CASES[ranks], models, small.samples(), examine_more)


def packed(folder: Path, platform: Any) -> dict[str, Any]:
    """Logits of samples packed together, before and after a change of the first, and the refusal of a prefix."""
    from dataclasses import replace

    from megatron_webrl.model.build import build_model, load_hf

    [model] = build_model(folder, dtype="float32", platform=platform)
    load_hf([model], folder)
    parts = small.samples()
    row, _ = tiny.pack(list(parts.values()))
    first = int(row.cu_seqlens[1])
    tokens = row.tokens.clone()
    tokens[:first] = (tokens[:first] + 1) % tiny.VISION_START
    with torch.no_grad():
        found = {"packed": model(row), "beside": model(replace(row, tokens=tokens))}
    try:
        model(replace(row, parents=torch.tensor([-1, 0, -1, -1])))
    except ValueError as error:
        found["refusal"] = str(error)
    return found
