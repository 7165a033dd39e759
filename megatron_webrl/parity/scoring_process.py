"""What a backend's processes are given, and what they leave: files in a folder of the check."""

from __future__ import annotations

import logging
import os
import pickle
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_webrl.model.compute_options import ComputeOptions
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.parity.samples import ParitySample

JOB_FILE = "work.pickle"
EXIT_BAD_INPUT = 2  # exit code of a process that refuses its input


@dataclass(frozen=True)
class ScoringJob:
    """One backend's task."""

    model: Path  # Hugging Face folder
    samples: tuple[ParitySample, ...]
    dtype: str  # "float32" or "bfloat16"
    platform: str  # "auto", "cpu" or "cuda"
    max_new_tokens: int  # tokens of an answer where a sample has none
    seed: int
    sizes: ParallelSizes  # Megatron's layout
    compute_options: ComputeOptions  # of Megatron's computation
    vllm_tensor_parallel: int
    timeout_seconds: float  # limit of everything that waits


@dataclass(frozen=True)
class ProcessScores:
    """What one process found."""

    logprobs: tuple[np.ndarray, ...] | None  # per sample float32 [response]; None: another rank has them
    responses: tuple[np.ndarray, ...]  # per sample int32 [response], the tokens scored; empty: those that were given
    load_seconds: float
    score_seconds: float
    peak_bytes: int  # GPU memory on CUDA, else the process's largest resident size


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def lap(self) -> float:
        """Seconds, and begin again."""
        passed, self._begun = time.monotonic() - self._begun, time.monotonic()
        return passed


def peak_bytes(cuda: bool) -> int:
    """The most memory that this process held."""
    if cuda:
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_rank() -> int:
    """Number of this process among those of its backend."""
    return int(os.environ.get("RANK", "0"))


def scores_file(folder: Path, number: int) -> Path:
    """Where process `number` leaves its Scores."""
    return folder / f"scores-{number}.pickle"


def error_file(folder: Path, number: int) -> Path:
    """Where process `number` leaves one line on why it refuses its input."""
    return folder / f"error-{number}.txt"


def run_scoring_process(score: Callable[[ScoringJob, Path], ProcessScores]) -> None:
    """Main of a backend's process: `python -m MODULE FOLDER`.

    What a backend raises as ValueError or ImportError is about its input, and ends it with BAD_INPUT.
    """
    logging.basicConfig(level=logging.WARNING)
    folder = Path(sys.argv[1])
    try:
        scores = score(pickle.loads((folder / JOB_FILE).read_bytes()), folder)
    except (ValueError, ImportError) as error:
        logging.exception("refused")
        error_file(folder, process_rank()).write_text(" ".join(str(error).split()) or type(error).__name__)
        # Not sys.exit: it would wait for the other ranks, or for vLLM's threads.
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT)
    temporary = scores_file(folder, process_rank()).with_suffix(".part")
    temporary.write_bytes(pickle.dumps(scores))
    temporary.rename(scores_file(folder, process_rank()))
