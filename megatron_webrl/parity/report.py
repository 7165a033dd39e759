"""How far the backends are apart, as numbers and as tables."""

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

from megatron_webrl.model.processor import Processor
from megatron_webrl.parity.backends import BackendScores
from megatron_webrl.parity.samples import ParitySample


@dataclass(frozen=True)
class WorstToken:
    """The token whose log-probabilities are furthest apart."""

    sample: str
    token: int  # place within the answer, from 0
    text: str
    logprobs: tuple[float, float]


@dataclass(frozen=True)
class LogprobDifference:
    """Two backends over all scored tokens. Numbers are absolute differences of log-probabilities."""

    backends: tuple[str, str]
    largest: float
    mean: float
    tokens: int
    worst: WorstToken
    by_sample: dict[str, float]  # largest of each sample

    def within(self, tolerance: float) -> bool:
        """Whether every token is; a difference that is no number is not."""
        return self.largest <= tolerance


def compare_backends(
    found: Sequence[BackendScores], samples: Sequence[ParitySample], processor: Processor
) -> list[LogprobDifference]:
    """Every pair of backends, in order."""
    return [_difference(a, b, samples, processor) for a, b in combinations(found, 2)]


def _difference(
    first: BackendScores, second: BackendScores, samples: Sequence[ParitySample], processor: Processor
) -> LogprobDifference:
    gaps = [
        np.abs(a.astype(np.float64) - b.astype(np.float64))
        for a, b in zip(first.logprobs, second.logprobs, strict=True)
    ]
    everything = np.concatenate(gaps)
    # A number that is none counts as the largest.
    tops = [np.nan_to_num(gap, nan=np.inf) for gap in gaps]
    which = int(np.argmax([top.max() for top in tops]))
    token = int(tops[which].argmax())
    worst = WorstToken(
        samples[which].name,
        token,
        processor.tokenizer.decode([int(samples[which].response_token_ids[token])]),
        (float(first.logprobs[which][token]), float(second.logprobs[which][token])),
    )
    return LogprobDifference(
        (first.backend, second.backend),
        float(everything.max()),
        float(everything.mean()),
        len(everything),
        worst,
        {sample.name: float(gap.max()) for sample, gap in zip(samples, gaps, strict=True)},
    )


def print_report(
    console: Console,
    samples: Sequence[ParitySample],
    found: Sequence[BackendScores],
    differences: Sequence[LogprobDifference],
    tolerance: float,
) -> None:
    """Print samples, backends and differences."""
    console.print(_samples(samples))
    console.print(_backends(found))
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
    for sample in samples:
        table.add_row(
            sample.name, str(len(sample.prompt_token_ids)), str(len(sample.images)), str(len(sample.response_token_ids))
        )
    return table


def _backends(found: Sequence[BackendScores]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="backends", title_justify="left")
    table.add_column("backend")
    for name in ("processes", "start and load s", "score s", "peak memory MiB"):
        table.add_column(name, justify="right")
    for each in found:
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
    found: Sequence[BackendScores],
    differences: Sequence[LogprobDifference],
    settings: dict[str, Any],
) -> None:
    """All numbers of the check, `settings` first."""
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
            for each in found
        ],
        "differences": [asdict(each) for each in differences],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
