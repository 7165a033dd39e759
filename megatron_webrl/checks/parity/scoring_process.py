"""Main of a backend's processes, and the files by which they receive their job and return scores."""

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

from megatron_webrl.checks.parity.samples import ParitySample
from megatron_webrl.model.compute_options import ComputeOptions
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.util import atomic_file
from megatron_webrl.util.text import configure_logging

JOB_FILE = "job.pickle"
EXIT_BAD_INPUT = 2  # exit code of a process that refuses its input


@dataclass(frozen=True)
class ScoringJob:
    """Samples and settings of one backend."""

    model: Path  # Hugging Face folder
    samples: tuple[ParitySample, ...]
    dtype: str  # "float32" or "bfloat16"
    platform: str  # "auto", "cpu" or "cuda"
    max_new_tokens: int  # tokens of a sampled response
    seed: int
    sizes: ParallelSizes  # Megatron's layout
    compute_options: ComputeOptions  # Megatron's
    vllm_tensor_parallel: int
    timeout_seconds: float  # limit of the backend and of each wait in it


@dataclass(frozen=True)
class ProcessScores:
    """Scores of one process."""

    logprobs: tuple[np.ndarray, ...] | None  # per sample float32 [response]; None: another rank returns them
    responses: tuple[np.ndarray, ...]  # per sample int32 [response]; empty: as in the job
    score_seconds: float
    peak_bytes: int  # GPU memory on CUDA, else the process's largest resident size


class Stopwatch:
    """Measures consecutive intervals."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last call, or since creation."""
        previous, self._started = self._started, time.monotonic()
        return self._started - previous


def peak_bytes(cuda: bool) -> int:
    """Peak memory of this process: GPU memory on CUDA, else resident size."""
    if cuda:
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def process_rank() -> int:
    """Rank of this process in its backend."""
    return int(os.environ.get("RANK", "0"))


def scores_file(folder: Path, rank: int) -> Path:
    """The file in which process `rank` returns its ProcessScores."""
    return folder / f"scores-{rank}.pickle"


def error_file(folder: Path, rank: int) -> Path:
    """The file in which process `rank` says in one line why it refuses its input."""
    return folder / f"error-{rank}.txt"


def run_scoring_process(score: Callable[[ScoringJob, Path], ProcessScores]) -> None:
    """Main of `python -m MODULE FOLDER`; a ValueError or ImportError means bad input: exits with EXIT_BAD_INPUT."""
    configure_logging(logging.BASIC_FORMAT, logging.WARNING)
    folder = Path(sys.argv[1])
    try:
        scores = score(pickle.loads((folder / JOB_FILE).read_bytes()), folder)
    except (ValueError, ImportError) as error:
        logging.exception("input refused")
        error_file(folder, process_rank()).write_text(" ".join(str(error).split()) or type(error).__name__)
        # Not sys.exit: it would wait for the other ranks, or for vLLM's threads.
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT)
    atomic_file.write_bytes(scores_file(folder, process_rank()), pickle.dumps(scores))
