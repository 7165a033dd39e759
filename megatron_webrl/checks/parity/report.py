"""Differences between backends, as numbers and as tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_webrl.checks.parity.backends import BackendScores
from megatron_webrl.checks.parity.samples import ParitySample
from megatron_webrl.model.processor import Processor


@dataclass(frozen=True)
class WorstToken:
    """The token with the largest difference."""

    sample: str
    token: int  # index in the response, from 0
    text: str
    logprobs: tuple[float, float]


@dataclass(frozen=True)
class LogprobDifference:
    """Absolute log-probability differences of two backends over all scored tokens."""

    backends: tuple[str, str]
    largest: float
    mean: float
    tokens: int
    worst: WorstToken
    by_sample: dict[str, float]  # sample -> its largest difference

    def within(self, tolerance: float) -> bool:
        """Whether every difference is at most `tolerance`; NaN is not."""
        return self.largest <= tolerance


def compare_backends(
    scores: Sequence[BackendScores], samples: Sequence[ParitySample], processor: Processor
) -> list[LogprobDifference]:
    """Differences of every pair of backends, in order."""
    return [_difference(a, b, samples, processor) for a, b in combinations(scores, 2)]


def _difference(
    first: BackendScores, second: BackendScores, samples: Sequence[ParitySample], processor: Processor
) -> LogprobDifference:
    differences = [
        np.abs(a.astype(np.float64) - b.astype(np.float64))
        for a, b in zip(first.logprobs, second.logprobs, strict=True)
    ]
    flat = np.concatenate(differences)
    ranked = [np.nan_to_num(values, nan=np.inf) for values in differences]  # NaN counts as the largest
    index = int(np.argmax([values.max() for values in ranked]))
    token = int(ranked[index].argmax())
    worst = WorstToken(
        samples[index].name,
        token,
        processor.tokenizer.decode([int(samples[index].response_token_ids[token])]),
        (float(first.logprobs[index][token]), float(second.logprobs[index][token])),
    )
    return LogprobDifference(
        (first.backend, second.backend),
        float(flat.max()),
        float(flat.mean()),
        len(flat),
        worst,
        {sample.name: float(values.max()) for sample, values in zip(samples, differences, strict=True)},
    )


def print_report(
    console: Console,
    samples: Sequence[ParitySample],
    scores: Sequence[BackendScores],
    differences: Sequence[LogprobDifference],
    tolerance: float,
) -> None:
    """Print samples, backends and differences."""
    console.print(_samples(samples))
    console.print(_backends(scores))
    table = Table(box=box.SIMPLE_HEAD, title="absolute differences of log-probabilities", title_justify="left")
    for name, justify in (("backends", "left"), ("largest", "right"), ("mean", "right"), ("tokens", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("worst token", overflow="fold")
    for each in differences:
        style = None if each.within(tolerance) else "bold red"
        table.add_row(
            " - ".join(each.backends),
            f"{each.largest:.2e}",
            f"{each.mean:.2e}",
            str(each.tokens),
            f"{each.worst.sample}, token {each.worst.token} {each.worst.text!r}: "
            f"{each.worst.logprobs[0]:.4f}, {each.worst.logprobs[1]:.4f}",
            style=style,
        )
    console.print(table)


def _samples(samples: Sequence[ParitySample]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="samples", title_justify="left")
    table.add_column("sample")
    for name in ("prompt tokens", "images", "tokens scored"):
        table.add_column(name, justify="right")
    for one in samples:
        table.add_row(one.name, str(len(one.prompt_token_ids)), str(len(one.images)), str(len(one.response_token_ids)))
    return table


def _backends(scores: Sequence[BackendScores]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="backends", title_justify="left")
    table.add_column("backend")
    for name in ("processes", "start and load s", "score s", "peak memory MiB"):
        table.add_column(name, justify="right")
    for each in scores:
        table.add_row(
            each.backend,
            str(each.processes),
            f"{each.load_seconds:.1f}",
            f"{each.score_seconds:.2f}",
            f"{each.peak_bytes / 2**20:.0f}",
        )
    return table


def write_json(
    path: Path,
    samples: Sequence[ParitySample],
    scores: Sequence[BackendScores],
    differences: Sequence[LogprobDifference],
    settings: dict[str, Any],
) -> None:
    """Write all numbers of the check, `settings` first."""
    content = {
        **settings,
        "samples": [
            {
                "name": sample.name,
                "prompt_tokens": len(sample.prompt_token_ids),
                "images": len(sample.images),
                "tokens": len(sample.response_token_ids),
            }
            for sample in samples
        ],
        "backends": [
            {
                "name": each.backend,
                "processes": each.processes,
                "load_seconds": each.load_seconds,
                "score_seconds": each.score_seconds,
                "peak_bytes": each.peak_bytes,
            }
            for each in scores
        ],
        "differences": [asdict(each) for each in differences],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
