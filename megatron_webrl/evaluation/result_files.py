"""Evaluation files of a run: evaluations.jsonl, and evaluations/ with the single episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_webrl.evaluation.evaluation_queue import EvaluationResult
from megatron_webrl.evaluation.results import paired_difference
from megatron_webrl.system import atomic_file, history
from megatron_webrl.system.history import History

FILE = "evaluations.jsonl"


def append_evaluation(folder: Path, line: dict[str, Any], results: Sequence[EvaluationResult]) -> None:
    """Add an evaluation; its episodes are written before its line, so that a reader of the line finds them."""
    path = _episodes_path(folder, line)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_file.write_text(path, "".join(json.dumps(asdict(result)) + "\n" for result in results))
    evaluations = History(folder / FILE)
    try:
        evaluations.append(line)
        evaluations.sync()
    finally:
        evaluations.close()


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """All evaluations of a run, oldest first."""
    return list(history.read(folder / FILE))


def read_results(folder: Path, line: dict[str, Any]) -> list[EvaluationResult]:
    """The single episodes of an evaluation."""
    return [
        EvaluationResult.from_json(json.loads(text)) for text in _episodes_path(folder, line).read_text().splitlines()
    ]


def truncate_after(folder: Path, version: int) -> None:
    """Delete the lines of versions after the one from which a run resumes: those versions are trained again."""
    path = folder / FILE
    if path.is_file():
        History(path, history.kept_size(path, lambda line: line["version"] <= version)).close()


def summarise(folder: Path, version: int) -> dict[str, Any]:
    """The field `evaluation` of summary.json; None for evaluations that did not run. `before` is the first evaluation
    of its kind, of the initial policy; the others are those of `version`, the run's last one.
    """
    lines = read_evaluations(folder)
    found: dict[str, Any] = {"before": next((line for line in lines if line["kind"] == "before"), None)}
    for kind in ("after", "blank_images"):
        of_kind = [line for line in lines if line["kind"] == kind and line["version"] == version]
        found[kind] = of_kind[-1] if of_kind else None
    for name, kind in (("gain", "before"), ("image_gain", "blank_images")):
        one, other = found[kind], found["after"]
        both = one is not None and other is not None
        found[name] = paired_difference(read_results(folder, one), read_results(folder, other)) if both else None
    return found


def _episodes_path(folder: Path, line: dict[str, Any]) -> Path:
    return folder / "evaluations" / f"version-{line['version']:06d}-{line['kind']}.jsonl"
