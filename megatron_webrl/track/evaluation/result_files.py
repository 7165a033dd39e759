"""Evaluation files of a run: evaluations.jsonl, and evaluations/ with the single episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_webrl.track.evaluation.evaluation_queue import BLANK_IMAGES, VARIANTS, EvaluationResult, evaluation_name
from megatron_webrl.track.evaluation.results import paired_difference, seeing_gain
from megatron_webrl.util import atomic_file, history
from megatron_webrl.util.disk_faults import continue_without
from megatron_webrl.util.history import History

FILE = "evaluations.jsonl"
NAMES = tuple(evaluation_name(kind, variant) for variant in VARIANTS for kind in ("before", "after"))
GAINS: dict[str, tuple[Callable[..., dict[str, Any] | None], tuple[str, ...]]] = {
    "gain": (paired_difference, ("before", "after")),
    "blind_gain": (paired_difference, ("before_blank_images", "after_blank_images")),
    "seeing_gain": (seeing_gain, ("before", "after", "before_blank_images", "after_blank_images")),
    "image_gain": (paired_difference, ("after_blank_images", "after")),
    "greedy_gain": (paired_difference, ("before_greedy", "after_greedy")),
}
"""Contrasts of summary.json: what computes each, and from the results of which evaluations."""


class EvaluationLog:
    """Writes the evaluations of a run. Lines for which the disk has no room wait in memory (History)."""

    def __init__(self, folder: Path, version: int | None = None, guard: Callable[[], object] = lambda: None) -> None:
        """Cut off the lines of versions after `version`, from which a run resumes; None keeps all. Raises OSError.

        `guard`: as of History.
        """
        self.folder, path = folder, folder / FILE
        kept = None if version is None else history.kept_size(path, lambda line: line["version"] <= version)
        self.history = History(path, kept, guard)

    def append(self, line: dict[str, Any], results: Sequence[EvaluationResult]) -> None:
        """Add an evaluation; its episodes are written before its line, so that a reader of the line finds them."""
        path = _episodes_path(self.folder, line)
        with continue_without(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_file.write_text(path, "".join(json.dumps(asdict(result)) + "\n" for result in results))
        self.history.append(line)
        with suppress(OSError):  # which the history has logged
            self.history.sync()


def read_evaluations(folder: Path) -> list[dict[str, Any]]:
    """All evaluations of a run, oldest first. Lines from before there were variants get the fields of today."""
    lines = list(history.read(folder / FILE))
    blank_kind = "checkpoint" if any(line["kind"] == "checkpoint" for line in lines) else "after"
    return [line if "variant" in line else _with_variant(line, blank_kind) for line in lines]


def _with_variant(line: dict[str, Any], blank_kind: str) -> dict[str, Any]:
    """A line of an older run, in which `blank_images` was a kind: what was evaluated before it, again."""
    is_blank = line["kind"] == BLANK_IMAGES
    kind = blank_kind if is_blank else line["kind"]
    return line | {"kind": kind, "variant": BLANK_IMAGES if is_blank else "", "first_task": 0}


def read_results(folder: Path, line: dict[str, Any]) -> list[EvaluationResult]:
    """The single episodes of an evaluation."""
    path = _episodes_path(folder, line)
    if line["variant"] == BLANK_IMAGES and not path.is_file():
        path = _episodes_path(folder, line | {"kind": BLANK_IMAGES, "variant": ""})  # of an older run
    return [EvaluationResult.from_json(json.loads(text)) for text in path.read_text().splitlines()]


def summarise(folder: Path, version: int) -> dict[str, Any]:
    """The field `evaluation` of summary.json: a line for each of NAMES and a contrast for each of GAINS; None where an
    evaluation is missing. Those before training are of the initial policy, the others of `version`, the run's last one.
    """
    lines = read_evaluations(folder)
    first = next((line["version"] for line in lines if line["kind"] == "before"), None)
    found: dict[str, Any] = dict.fromkeys((*NAMES, *GAINS))
    for line in lines:
        name = evaluation_name(line["kind"], line["variant"])
        if name in NAMES and line["version"] == (first if line["kind"] == "before" else version):
            found[name] = line
    results = {}
    for name in NAMES:
        with suppress(FileNotFoundError):  # episodes for which the disk had no room
            if found[name] is not None:
                results[name] = read_results(folder, found[name])
    for gain, (compute, names) in GAINS.items():
        if results.keys() >= set(names):
            found[gain] = compute(*(results[name] for name in names))
    return found


def with_all_names(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The field `evaluation` of a summary.json that may be of an older run, with all NAMES and GAINS."""
    stored: dict[str, Any] = dict.fromkeys((*NAMES, *GAINS)) | dict(evaluation)
    if BLANK_IMAGES in stored:
        stored["after_blank_images"] = stored.pop(BLANK_IMAGES)
    for name in NAMES:
        if stored[name] is not None:
            kind, _, variant = name.partition("_")
            stored[name] = {"first_task": 0} | stored[name] | {"kind": kind, "variant": variant}
    return stored


def _episodes_path(folder: Path, line: dict[str, Any]) -> Path:
    name = evaluation_name(line["kind"], line["variant"])
    return folder / "evaluations" / f"version-{line['version']:06d}-{name}.jsonl"
