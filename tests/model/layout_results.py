"""Results of transformers, and of gloo processes in every layout, by model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.gloo import spawn
from tests.model import tiny

References = tuple[Path, dict[str, dict[str, Any]]]
Examined = Callable[[int, str, str], list[dict[str, Any]]]


def write_references(
    folder: Path,
    shapes: Mapping[str, Any],
    write_model: Callable[[Path, Any, int], Any],
    samples: Callable[[], dict[str, tiny.Sample]],
) -> References:
    """Write the models to folders of their names; the folder, and logits and gradients of transformers by model."""
    found = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        model, parts = write_model(folder / name, shape, seed), samples()
        tiny.reference_loss(model, list(parts.values())).backward()
        with torch.no_grad():
            logits = {key: tiny.reference_logits(model, sample) for key, sample in parts.items()}
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        found[name] = {"logits": logits, "gradients": gradients}
    return folder, found


def examine_once(run: Callable[[int, int, str], None], folder: Path) -> Examined:
    """(ranks, case, model) -> results of each rank; `run` writes those of all cases of a number of ranks."""
    done: set[int] = set()

    def found(ranks: int, case: str, model: str) -> list[dict[str, Any]]:
        if ranks not in done:
            spawn(run, ranks, str(folder), ranks=ranks, seconds=600)
            done.add(ranks)
        everyone: list[dict[str, Any]] = torch.load(folder / f"found-{ranks}-{case}-{model}.pt")
        return everyone

    return found


def compare_gradients(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that all gradients are equal within a thousandth of their norm, and that none is zero."""
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        wanted = expected[key]
        assert wanted.norm() > 1e-6, f"{key}: the expected gradient is zero, the comparison would be empty"
        error = ((gradient - wanted).norm() / wanted.norm()).item()
        assert error < 1e-3, f"{key}: relative error {error:.2e}"
