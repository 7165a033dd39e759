"""Options, progress bar and error handling of the two conversion tools."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_webrl.model.convert.conversion import ConversionOptions, ConversionSummary
from megatron_webrl.model.convert.hf_files import DTYPE_NAMES

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_NAMES}
BYTE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both directions."""
    parser.add_argument("--dtype", choices=DTYPES, help="type of the result (default: unchanged)")
    parser.add_argument("--verify", action="store_true", help="read the result again and compare it bit for bit")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")


def make_options(arguments: argparse.Namespace) -> ConversionOptions:
    """The conversion options of parsed arguments."""
    return ConversionOptions(DTYPES.get(arguments.dtype), arguments.overwrite, arguments.verify, progress_bar)


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], object]]:
    """A progress bar in bytes on standard error, if that is a terminal; yields a function that adds bytes."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda done: progress.advance(task, done)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "300 MB" or "1000"; units are powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]B)?", text.strip().upper())
    if not match or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 5GB or 300MB")
    return int(float(match[1]) * BYTE_UNITS[match[2] or ""])


def run_conversion(tool: str, target: Path, convert: Callable[[], ConversionSummary]) -> int:
    """Convert and print a summary. Exit code: 2 and one line for an error, 130 for an interrupt."""
    interrupts = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    try:
        summary = convert()
    except (Exception, KeyboardInterrupt) as error:
        if interrupts:  # whatever was raised: torch's C++ code puts errors of its own in an interrupt's place
            print(f"{tool}: interrupted; nothing was written", file=sys.stderr)
            return 130
        if not isinstance(error, (ValueError, OSError)):
            raise
        print(f"{tool}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGINT, previous)
    print(f"{target}: {summary.tensors} tensors, {summary.nbytes / 1e9:.3f} GB")
    return 0
